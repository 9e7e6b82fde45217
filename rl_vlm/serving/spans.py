"""The spans of a request in its replica."""

from __future__ import annotations

from rl_vlm.tracing import Span, add, continued
from rl_vlm.types import Completion


def engine_spans(
    trace: str, completion: Completion, arrived_ns: int, admitted_s: float, seconds: float
) -> tuple[Span, ...]:
    """`engine`, the whole call of `seconds`, and its parts `admit` (waiting for the adapter version), `queue` and `generate`.

    A call of several requests ends with the slowest of them, so the parts of the others end before it does.
    """
    service, ends_ns = f"replica-{completion.replica_id}", arrived_ns + _ns(seconds)
    queued_ns = min(arrived_ns + _ns(admitted_s), ends_ns)
    started_ns = min(queued_ns + _ns(completion.queue_s), ends_ns)
    done_ns = min(started_ns + _ns(completion.generate_s), ends_ns)
    counts = {
        "version": completion.policy_version,
        "prompt_tokens": len(completion.prompt_ids),
        "tokens": sum(len(sample.token_ids) for sample in completion.samples),
    }
    with continued(trace, service) as spans:
        engine = add("engine", arrived_ns, ends_ns, **counts)
    with continued(engine, service) as parts:
        add("admit", arrived_ns, queued_ns)
        add("queue", queued_ns, started_ns)
        add("generate", started_ns, done_ns)
    return (*spans, *parts)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
