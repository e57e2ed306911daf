"""The domain's agent with smolagents' CodeAgent: it acts by Python in its text, which a stop string cuts off."""

from smolagents import CodeAgent
from with_smolagents import main

main(CodeAgent)
