"""An engine process whose rejection sampler accepts one wrong draft. Imported by that process."""

from typing import Any

from nwor_bench.engine.arms import _serve as serve


def accept_a_wrong_draft(*args: Any) -> None:
    """Serve an engine; the first draft that the target rejects becomes its request's token."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    original, planted = RejectionSampler.forward, []

    def forward(sampler: Any, metadata: Any, *rest: Any, **named: Any) -> Any:
        output = original(sampler, metadata, *rest, **named)
        ends = metadata.cu_num_draft_tokens.tolist()
        for row, start, end in zip(output.sampled_token_ids, [0, *ends], ends, strict=False):
            draft = metadata.draft_token_ids[start] if start < end else row[0]
            if not planted and row[0] != draft:
                planted.append(draft.item())
                row[0] = draft
        return output

    RejectionSampler.forward = forward  # type: ignore[method-assign]
    serve(*args)
