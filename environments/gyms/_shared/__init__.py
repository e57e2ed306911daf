"""What all gyms share: one tool, budgets, per-turn rewards, pinned tasks, an opening user, oracles by rule or by LLM.

A gym is a game between the policy and another side that answers inside the tool ``interact`` (``choice``, ``content``).
To add one, make a folder ``environments/gyms/<short name>/`` with ``policy.md`` (the full system prompt),
``manifest.json`` (made by ``python -m environments.gyms._shared.pin <short name>``) and an ``__init__.py``::

    class GuessGame(Game):                        # one episode; never sees another one
        async def action(self, content: str) -> Reply:       # one coroutine a legal choice, but none for finish
            return Reply("higher" if ... else "lower")
        async def answer(self, content: str) -> Reply:
            if content != self.task.data["number"]:
                return Reply("No.", error=False)
            self.solved = True
            return Reply("Yes.", reward=1.0, over=True)      # over: the episode ends here

    class GuessGym(Gym):
        name = "gyms/guess"
        choices = {"action": "a number; ...", "answer": "...", "finish": "give up"}
        defaults = {"max_answers": 3}             # environment.options that it knows, with their defaults
        short_prompt = "Find the number with the tool interact."
        @classmethod
        def generate(cls, split): ...             # yields Task(id, self.name, split, data with kind and difficulty)
        def game(self, task, seed): return GuessGame(self.setting, task, seed)
        def openings(self, task): ...             # wordings of the user's first utterance; the seed picks one
        def persona(self, task): ...              # what an LLM that plays the other side is told
        def gold(self, task): return [act("answer", task.data["number"])]
        def expert(self, task, seed, loose=0.0): ...         # optional, see mua.environment.domain.Expert

    DOMAIN = GuessGym()

The base checks arguments, counts budgets, refuses calls after the end, ends the episode on ``finish`` and when the
budget of the decisive choice (``Gym.decisive``) is used up, adds the reward to the observation only under
``environment.show_reward``, and judges: :meth:`GymEnvironment.evaluate` adds reward 0 and reports ``Game.solved``.

Options ``max_actions``, ``max_answers`` and ``max_searches`` in ``defaults`` are budgets that the base keeps (0: none);
the game reads any other by ``self.setting.options[key]``. In a mix of several domains an option is written with the
gym's short name, ``{guess.max_answers: 5}``.

With ``environment.oracle: llm`` a gym that lists ``llm_roles`` gets ``self.setting.user`` (plays the other side) and
``self.setting.judge``; :mod:`environments.gyms._shared.oracles` asks them. What cannot be read raises
:class:`UserFault` or :class:`JudgeFault`, and the episode is tried again: no fault is a reward.

What a game pays is finite, never negative, never in the text unless configured, and bounded in total over an episode;
anything else is a :class:`EnvironmentFault`. Every gym has the options of
:mod:`environments.gyms._shared.game` besides its own: a scale, a penalty for each step, under which alone a call's
reward may fall below 0, and a clip.

A gym with a kind of UserRL's records (:mod:`environments.gyms._shared.records`) loads them by ``environment.data``::

        lacking = "table of answers"              # what the rule oracle needs and a record lacks: then oracle: llm only
        @staticmethod
        def from_record(record): ...              # data of the task; the game, gold and expert know it by its keys

and may bring ``records.md``, ``record_choices`` and ``record_prompt`` for such tasks.

A gym should pay for what it is about and for nothing else: list the policies that would get something for nothing in
``players`` (:mod:`environments.kit.canned`), and make them get nothing.
"""

from environments.gyms._shared.game import Choice, Game, GymEnvironment, Reply, Setting, act
from environments.gyms._shared.gym import Gym, OpeningUser, dealt

__all__ = ["Choice", "Game", "Gym", "GymEnvironment", "OpeningUser", "Reply", "Setting", "act", "dealt"]
