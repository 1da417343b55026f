"""What SGLang's HTTP server is asked and what it answers: endpoints, fields, and the differences between versions.

Everything here was seen at a real server (0.5.23), not taken from its documentation. A version that needs other fields
gets a `Contract` of its own in `CONTRACTS`; the rest of the package asks the contract and knows no field names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megappo.errors import UserError
from megappo.rollout.base import FinishReason, GenerateRequest, SamplingParams

GENERATE = "/generate"
ALIVE = "/model_info"  # answered by the HTTP front at once
HEALTH = "/health_generate"  # passes through the scheduler: takes a second, and fails where generation hangs
SERVER_INFO = "/server_info"
PAUSE, CONTINUE, ABORT, FLUSH = "/pause_generation", "/continue_generation", "/abort_request", "/flush_cache"
BEGIN_UPDATE, END_UPDATE = "/begin_weight_update", "/end_weight_update"
FROM_TENSOR, FROM_DISK = "/update_weights_from_tensor", "/update_weights_from_disk"
FROM_GROUP = "/update_weights_from_distributed"
INIT_GROUP, DESTROY_GROUP = "/init_weights_update_group", "/destroy_weights_update_group"


class BadAnswer(Exception):
    """An answer that cannot be the response to the request; the message says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked response. `version`: the server's name for the weights that wrote its last token."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    version: str
    cached_tokens: int


@dataclass(frozen=True)
class Contract:
    """One range of versions.

    Attributes:
        sessions: tensor and group updates stand between `BEGIN_UPDATE` and `END_UPDATE`.
    """

    sessions: bool = True

    def generate(self, request: GenerateRequest, sampling: SamplingParams, rid: str, seeded: bool) -> dict[str, Any]:
        """Body of `GENERATE`. Seeds count only on a server with deterministic inference, others refuse none."""
        params: dict[str, Any] = {
            "n": 1,
            "max_new_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            # The server stops at the model's end-of-text tokens on its own; `ignore_eos` would drop these here, too.
            "stop_token_ids": list(sampling.stop_token_ids),
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.stop_strings:
            params["stop"] = list(sampling.stop_strings)
        if seeded:
            params["sampling_seed"] = request.seed
        return {
            "rid": rid,
            "input_ids": request.prompt_ids,
            "sampling_params": params,
            "return_logprob": True,
            "stream": False,
        }

    def answer(self, body: Any, request: GenerateRequest, sampling: SamplingParams, rid: str) -> Answer:
        """Check the answer to `generate` against its request.

        Raises:
            BadAnswer: it belongs to another request, is cut short, or its counts contradict each other.
        """
        try:
            meta = body["meta_info"]
            pairs = meta["output_token_logprobs"]
            ids, logprobs = [int(pair[1]) for pair in pairs], [float(pair[0]) for pair in pairs]
            reason = meta["finish_reason"]
            kind, version = reason["type"], str(meta["weight_version"])
            counts = (len(body["output_ids"]), int(meta["completion_tokens"]), len(ids))
            found, prompt, cached = str(meta["id"]), int(meta["prompt_tokens"]), int(meta.get("cached_tokens") or 0)
            same = list(body["output_ids"]) == ids
        except (KeyError, TypeError, ValueError, IndexError) as error:
            shape = "a list" if isinstance(body, list) else "an answer"
            raise BadAnswer(f"{shape} without the expected fields ({type(error).__name__}: {error})") from None
        if found != rid:
            raise BadAnswer(f"it is the answer to request {found}, not to {rid}")
        if kind not in ("stop", "length"):
            raise BadAnswer(f"the server ended the request itself ({kind}: {_one_line(reason.get('message'))})")
        if len(set(counts)) > 1 or not same:
            raise BadAnswer("output_ids, completion_tokens and log-probs disagree: {}, {}, {}".format(*counts))
        if prompt != len(request.prompt_ids):
            raise BadAnswer(f"it counts {prompt} prompt tokens of {len(request.prompt_ids)}")
        if not 0 < len(ids) <= sampling.max_new_tokens:
            raise BadAnswer(f"{len(ids)} tokens where 1 to {sampling.max_new_tokens} were asked for")
        if kind == "length" and len(ids) < sampling.max_new_tokens:
            raise BadAnswer(
                f"cut at {len(ids)} of {sampling.max_new_tokens} tokens: the server's context length is too short"
            )
        if not all(logprob <= 1e-3 for logprob in logprobs):  # NaN fails, too
            raise BadAnswer("log-probs that are no log-probs")
        return Answer(ids, logprobs, kind, version, cached)

    def updated(self, body: Any) -> str | None:
        """What is wrong with the answer to a weight update; None: nothing."""
        if isinstance(body, dict) and body.get("success") is True:
            return None
        return _one_line(body.get("message") if isinstance(body, dict) else body) or "no reason given"


#: (first version, first version that is not covered, contract), newest last
CONTRACTS: Sequence[tuple[tuple[int, ...], tuple[int, ...], Contract]] = (((0, 5, 23), (0, 6), Contract()),)


def contract_for(version: Any, url: str) -> Contract:
    """The contract of the server at `url`, which calls itself `version`.

    Raises:
        UserError: the version is not known.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(version))
    numbers = tuple(int(part or 0) for part in match.groups()) if match else ()
    for first, end, contract in CONTRACTS:
        if first <= numbers < end:
            return contract
    ranges = ", ".join(f"{_dotted(first)} up to {_dotted(end)}" for first, end, _ in CONTRACTS)
    raise UserError(f"{url} runs SGLang {version}, MegaPPO knows {ranges}: install one of these for the servers")


def _dotted(version: Sequence[int]) -> str:
    return ".".join(str(part) for part in version)


def _one_line(text: Any, limit: int = 200) -> str:
    return " ".join(str(text or "").split())[:limit]
