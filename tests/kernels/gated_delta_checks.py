"""What every implementation of verify and commit of gated delta windows must do."""

from collections.abc import Callable
from typing import Any

import torch
from gated_delta_cases import MARGIN, Case, assert_rounded, definition, gated, largest_error
from kernel_inputs import assert_same, generator

Verify = Callable[..., None]
Commit = Callable[..., None]


def check_window(
    case: Case, verify: Verify, commit: Commit, seed: int, norm: str | None = None
) -> None:
    """Outputs, records and states of a window are those of the float64 definition.

    Nothing else is written: other slots, other rows' records, outputs of padding. Then the same
    window writes the states of all tokens, as vLLM does.

    Args:
        verify, commit: with the arguments of the references.
        norm: the gate's activation; None: no gated norm.
    """
    committed = torch.tensor(
        [_draw(length, seed + row) for row, length in enumerate(case.lengths)],
        dtype=torch.int32,
        device=case.mixed.device,
    )
    options = {"scale": case.shape.scale}
    if norm is not None:
        options["norm"] = case.norm._replace(activation=norm)
    wanted = [definition(case, layer) for layer in range(len(case.states))]
    before, records = case.pages.clone(), case.nan_records()
    for layer, (outputs, _) in enumerate(wanted):
        _check_outputs(case, verify, layer, outputs, records.layer(layer), options, norm)
    assert_same(case.pages, before)
    _check_records(case, records)

    commit(case.states, case.groups, case.tables, case.accepted, committed, records)
    written = {
        (layer, row): int(committed[row]) for layer in range(len(wanted))
        for row in range(len(case.lengths)) if committed[row] > 0
    }  # fmt: skip
    _check_states(case, before, wanted, written)

    case.pages.copy_(before)
    for layer in range(len(wanted)):
        out = case.nan_out(torch.float32)
        records_of = case.nan_records().layer(layer)
        verify(case.layer_inputs(layer), out, records_of, **options, write_states=True)
    every = {
        (layer, row, token): token for layer in range(len(wanted))
        for row, length in enumerate(case.lengths) for token in range(1, length + 1)
    }  # fmt: skip
    _check_states(case, before, wanted, every)


def _draw(length: int, seed: int) -> int:
    return int(torch.randint(0, length + 1, (1,), generator=generator(seed)))


def _check_outputs(
    case: Case,
    verify: Verify,
    layer: int,
    wanted: torch.Tensor,
    records: Any,
    options: dict[str, Any],
    norm: str | None,
) -> None:
    """Close in float32, and in the first layer rounded to the activations' dtype."""
    for dtype, bound in ((case.mixed.dtype, 2e-2), (torch.float32, 1e-5))[layer > 0 :]:
        out = case.nan_out(dtype)
        verify(case.layer_inputs(layer), out, records, **options)
        assert bool(out[case.tokens :].isnan().all()), "outputs of padding were written"
        norm_options = options.get("norm")
        expected = wanted if norm_options is None else gated(wanted, norm_options, dtype)
        if case.tokens and bool(expected.any()):
            assert largest_error(out[: case.tokens].cpu(), expected.cpu()) < bound
        else:
            assert not bool(out[: case.tokens].any())


def _check_records(case: Case, records: Any) -> None:
    """Records of the rows' own tokens, and only those, were written."""
    own = torch.zeros(records.u.shape[:3], dtype=torch.bool)
    for layer, group in enumerate(case.groups):
        for row, length in enumerate(case.lengths):
            slot = case.tables[group][row, int(case.accepted[row]) - 1]
            own[layer, row, :length] = bool(slot > 0)
    for each in records:
        is_nan = each.isnan().flatten(3)
        assert bool((is_nan.all(-1).cpu() == ~own).all() and (is_nan.any(-1).cpu() == ~own).all())


def _check_states(
    case: Case, before: torch.Tensor, wanted: list[Any], written: dict[Any, int]
) -> None:
    """The slots of `written` hold the state after so many tokens; all others are as before."""
    for (layer, row, *_), tokens in written.items():
        slot = int(case.tables[case.groups[layer]][row, tokens - 1])
        if slot > 0:
            assert_rounded(case.states[layer][slot].cpu(), wanted[layer][1][row][tokens].cpu())
            case.pages[layer, slot, MARGIN:-MARGIN] = before[layer, slot, MARGIN:-MARGIN]
    assert_same(case.pages, before)
