"""Whose fault it is: every row of the table, messages of servers in their own words, and that nothing that a policy can
bring about leaves its own episode unscored.

Where the table is asked: test_endpoint_replies.py, test_mcp_http.py, test_reading_tools.py, test_sandbox_tools.py.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest

from environments.help_desk.tasks import generate
from mua.environment import blame as table
from mua.environment.blame import CODES, DEFAULTS, WORDS, Blame, blame, error_codes
from mua.environment.endpoint.chat import read_refusal
from mua.environment.endpoint.services import Services
from mua.environment.mcp.health import ServerFaultKind, ToolServerFault
from mua.rollout import runner as runner_module
from mua.rollout.runner import EpisodeRunner
from mua.types import Json, Outcome
from mua.utils.errors import EnvironmentFault, JudgeFault, UserFault
from tests.rollout_fixtures import FixedUser, ScriptedSampler, TestDesk, call, experiment, lines, only
from tests.tokens_fixtures import chat_family

TASK = generate("train", 77, "cancel")
FULL: dict[str, tuple[int, Json | str]] = {
    "OpenAI": (400, {"message": "x", "type": "invalid_request_error", "code": "context_length_exceeded"}),
    "OpenAI, in words": (400, {"message": "This model's maximum context length is 8192 tokens. However, your messages "
                                          "resulted in 9001 tokens. Please reduce the length of the messages."}),
    "OpenAI, newer": (400, {"message": "Your input exceeds the context window of this model."}),
    "vLLM": (400, {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens "
                              "(4000 in the messages, 1000 in the completion).", "code": 400}),
    "vLLM, prompt": (400, {"message": "The decoder prompt (length 5000) is longer than the maximum model length of "
                                      "4096. Make sure that `max_model_len` is no smaller.", "code": 400}),
    "vLLM, no room": (400, {"message": "max_tokens must be at least 1, got -904.", "code": 400}),
    "vLLM, newest": (400, {"message": "You passed 4097 input tokens and requested 0 output tokens. However, the "
                                      "model's context length is only 4096 tokens.", "code": 400}),
    "SGLang": (400, {"message": "The input (5000 tokens) is longer than the model's context length (4096 tokens)."}),
    "SGLang, sum": (400, {"message": "Requested token count exceeds the model's maximum context length of 4096."}),
    "SGLang, input": (400, {"message": "Input length (5000 tokens) exceeds the maximum allowed length (4090 tokens)."}),
    "Anthropic": (400, {"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens > 200000"}),
    "Anthropic, sum": (400, {"message": "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000"}),
    "Gemini": (400, {"message": "The input token count (1200000) exceeds the maximum number of tokens allowed "
                                "(1048576).", "code": 400}),
    "Mistral": (400, {"message": "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 "
                                 "maximum context length"}),
    "TGI": (422, {"message": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4000 "
                             "`inputs` tokens and 1000 `max_new_tokens`"}),
    "TGI, prompt": (422, "Input validation error: `inputs` must have less than 4096 tokens. Given: 5000"),
    "llama.cpp": (400, {"code": 400, "type": "exceed_context_size_error", "message": "x"}),
    "llama.cpp, older": (500, {"message": "the request exceeds the available context size. try increasing it"}),
    "Ollama": (400, "prompt too long; exceeded max context length by 123 tokens"),
    "LM Studio": (400, "Trying to keep the first 5000 tokens when context the overflows. However, the model is loaded "
                       "with context length of only 4096 tokens"),
    "Groq": (400, {"message": "Please reduce the length of the messages or completion.", "code": "x"}),
    "Fireworks": (400, {"message": "The prompt is too long: 9000, model maximum context length: 8191"}),
    "xAI": (400, "This model's maximum prompt length is 131072 but the request contains 200000 tokens."),
    "Cohere": (400, {"message": "too many tokens: total number of tokens in the prompt cannot exceed 4081"}),
    "Bedrock": (400, {"message": "Input is too long for requested model."}),
    "Bedrock, counted": (400, "Too many input tokens. Max input tokens: 100, request input token count: 200"),
    "DashScope": (400, {"code": "invalid_parameter_error", "message": "Range of input length should be [1, 30720]"}),
    "Zhipu": (400, {"code": "1261", "message": "Prompt 超长"}),
    "Moonshot": (400, {"message": "Invalid request: Your request exceeded model token limit: 8192 (requested: 9000)"}),
    "MiniMax": (400, "invalid params, context window exceeds limit (2013)"),
    "OpenRouter": (400, {"message": "This endpoint's maximum context length is 8192 tokens.", "code": 400}),
    "TensorRT-LLM": (400, "Prompt length (5000) exceeds maximum input length (4096)"),
    "LMDeploy": (400, "the input is too long for session_len 4096"),
    "LiteLLM": (400, {"message": "x", "type": "ContextWindowExceededError"}),
    "nginx": (413, "<html>Request Entity Too Large</html>"),
    "SGLang, no room": (400, "max_new_tokens must be at least 0, got -5."),
    "Vertex": (400, "the input token count is 40000 but model only supports up to 32767."),
    "AI21": (422, "Prompt has 9000 tokens + requested maxTokens 4097, while the maximum is 8191"),
    "MLC": (400, "Request prompt has 4000 tokens in total, larger than the model input length limit 2048."),
    "Ark": (400, "Total tokens of image and text exceed max message tokens"),
    "Spark": (400, "Token count exceeds the upper limit"),
    "Hunyuan": (400, "输入内容过长"),
    "Snowflake": (400, "max tokens of 8000 exceeded"),
    "Bedrock, characters": (400, "Malformed input request: expected maxLength: 400000, actual: 500000"),
    "Databricks": (400, "Prompt length (9000) plus max_tokens (500) must be less than 8192"),
    "in the code alone": (400, {"message": "x", "code": "max_context_length_reached"}),
}  # fmt: skip
NOT_FULL: dict[str, tuple[int, Json | str, Blame]] = {
    "tokens a minute": (413, {"code": "rate_limit_exceeded", "message": "Request too large for model on tokens per "
                                                                        "minute (TPM): Limit 6000"}, Blame.PASSING),
    "a rate": (429, {"message": "Rate limit reached: too many tokens in the context window"}, Blame.PASSING),
    "a minute, in words": (400, "request too large: 9000 tokens per minute are allowed", Blame.PASSING),
    "completion": (400, "max_tokens is too large: 99999. This model supports at most 16384 completion tokens",
                   Blame.PASSING),
    "a field": (400, "no such field: contextual", Blame.PASSING),
    "a deadline": (504, "The request exceeded the deadline of 60 s", Blame.PASSING),
    "a timeout": (500, "Request took too long: execution time exceeded 60 s", Blame.PASSING),
    "a queue": (503, "The request queue is full: number of queued requests exceeds 128", Blame.PASSING),
    "concurrency": (400, "Your request exceeded the concurrency limit for this key", Blame.PASSING),
    "credits": (402, "This request exceeds your remaining credits", Blame.PASSING),
    "a budget": (400, "ExceededBudget: this request exceeds the max budget of the team", Blame.PASSING),
    "memory": (500, "CUDA out of memory for a prompt too long", Blame.PASSING),
    "an option": (400, "temperature in the request exceeds 2.0", Blame.PASSING),
    "completion tokens": (400, "completion tokens exceed 4096", Blame.PASSING),
    "overloaded": (529, {"type": "overloaded_error", "message": "Overloaded"}, Blame.PASSING),
    "a model": (404, {"code": "model_not_found", "message": "x"}, Blame.PERSON),
    "a key": (401, {"code": "invalid_api_key", "message": "Your session's context is not known"}, Blame.PERSON),
    "Azure's filter": (400, {"code": "content_filter", "message": "The response was filtered"}, Blame.POLICY),
    "DashScope's filter": (400, {"code": "data_inspection_failed", "message": "x"}, Blame.POLICY),
    "DeepSeek's filter": (400, {"message": "Content Exists Risk", "code": "invalid_request_error"}, Blame.POLICY),
    "OpenRouter's filter": (403, {"code": 403, "message": "x", "metadata": {"flagged_input": "y"}}, Blame.POLICY),
    "MiniMax's filter": (400, "input new_sensitive", Blame.POLICY),
    "Ark's filter": (400, {"code": "InputTextSensitiveContentDetected", "message": "x"}, Blame.POLICY),
    "LiteLLM's filter": (400, {"message": "litellm.ContentPolicyViolationError: x", "code": "400"}, Blame.POLICY),
    "a filter, in words": (400, "Your prompt was flagged by our safety system", Blame.POLICY),
}  # fmt: skip


@pytest.mark.parametrize("server", FULL)
def test_a_conversation_that_is_too_long_is_known_by_what_its_server_says(server: str) -> None:
    status, said = FULL[server]
    found = read_refusal(status, said if isinstance(said, dict) else None, str(said))
    assert (found.blame, found.retry) == (Blame.CONTEXT, False)


@pytest.mark.parametrize("case", NOT_FULL)
def test_what_only_sounds_like_it_is_not(case: str) -> None:
    status, said, whose = NOT_FULL[case]
    found = read_refusal(status, said if isinstance(said, dict) else None, str(said))
    assert found.blame is whose


@pytest.mark.parametrize(("place", "code"), [(place, code) for place in CODES for code in CODES[place]], ids=str)
def test_a_code_decides_before_words_and_defaults(place: Any, code: Any) -> None:
    words = "context length exceeded, session unknown, no results, rate limit"
    assert blame(place, [None, "unheard of", code, *reversed(CODES[place])], words) is CODES[place][code]
    if isinstance(code, str):
        assert code == code.lower()
        assert blame(place, [code.upper()]) is CODES[place][code]


def test_the_table_is_whole() -> None:
    assert set(CODES) == set(WORDS) == set(DEFAULTS) == set(get_args(table.Place))
    kinds = {kind.value for kind in ServerFaultKind}
    assert kinds <= {*CODES["tool_server"]}
    for place, whose in DEFAULTS.items():
        assert blame(place, [999], "nothing that anybody knows") is whose


def test_no_action_of_a_policy_is_passed_over() -> None:
    """At a tool server, a search or a sandbox nothing is ``passing`` untested but what says so itself (``told``), or is
    about the address (``refused``)."""
    for place in ("tool_server", "search", "sandbox"):
        passing = {code for code, whose in CODES[place].items() if whose in (Blame.PASSING, Blame.PERSON)}  # type: ignore[index]
        assert passing <= {"told", "refused", "not_started", 401}
        assert DEFAULTS[place] in (Blame.CONTROL, Blame.POLICY)  # type: ignore[index]


def test_codes_are_found_where_servers_put_them() -> None:
    assert error_codes({"code": None, "type": "x", "innererror": {"code": "ResponsibleAIPolicyViolation"}}) == [
        "ResponsibleAIPolicyViolation", "x",
    ]  # fmt: skip
    assert error_codes("text") == error_codes(None) == error_codes({"code": True}) == []
    assert blame("endpoint", ["ResponsibleAIPolicyViolation"]) is Blame.POLICY


class Refusing(FixedUser):
    """Its model refuses to go on with what the agent said."""

    async def reply(self, agent_text: str) -> Any:
        raise brought_about(UserFault("HTTP 400: content_filter"))


def brought_about(fault: Any) -> Any:
    fault.by_policy = True
    return fault


@pytest.mark.parametrize("retries", [0, 2])
@pytest.mark.parametrize("where", ["tool", "user", "verdict"])
async def test_what_a_policy_brings_about_is_tried_again_and_then_scored(
    where: str, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_FIRST_PAUSE_S", 0.0)
    domain = TestDesk()

    def crash(number: int, result: Any) -> Any:
        raise brought_about(ToolServerFault("it ended", ServerFaultKind.CRASHED))

    async def judged(self: Any, transcript: Any) -> Any:
        raise brought_about(JudgeFault("HTTP 400: content_filter"))

    if where == "tool":
        monkeypatch.setattr("mua.environment.manager.EnvironmentInstance.call", lambda *_: crash(0, None))
    elif where == "user":
        domain.user = lambda task, seed: Refusing("never")
    else:
        monkeypatch.setattr("mua.environment.manager.EnvironmentInstance.evaluate", judged)
    said = "Your name?" if where == "user" else call("cancel_order", order=TASK.data["known"]["order"])
    family = chat_family("qwen3", False)
    config = experiment(rollout={"max_retries": retries})
    sampler = ScriptedSampler(family, lines(said, "Done."))
    runner = EpisodeRunner(config, only(domain), family, sampler, Services())
    found = await runner.trajectory(TASK, 4, 0, temperature=1.0)
    await runner.close()
    assert (found.scored, found.success, found.attempts) == (True, False, retries + 1)
    assert found.outcome is (Outcome.USER_STOP if where == "verdict" else Outcome.MALFORMED)
    assert any("fault" in message for message in found.messages)
    assert found.sampled_tokens > 0
    assert issubclass(ToolServerFault, EnvironmentFault)
