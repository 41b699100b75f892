"""Arms that are ways to draft: as the command line writes them, and the models that they need."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nwor_bench.errors import ConfigError
from nwor_bench.models.methods import FROM_TARGET, WITHOUT_DRAFTER, Method
from nwor_bench.models.pairs.cache import OnProgress
from nwor_bench.models.pairs.fetch import resolve_pair
from nwor_bench.models.pairs.pair import ResolvedPair, load_pair
from nwor_bench.workload.method_arms import METHOD, MODEL, MethodArm, entries_of
from nwor_bench.workload.options import read_as
from nwor_bench.workload.run_spec import DEFAULT_PAIR, PairChoice

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def read_arms(flag: str, texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Arms by name, from `ngram`, `eagle3=DRAFTER` or `mine={"method": "eagle3", ...}`. Raises
    ConfigError."""
    arms: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not _NAME.fullmatch(name):
            remedy = "write METHOD, METHOD=DRAFTER or NAME={JSON}, such as ngram"
            raise ConfigError.for_field(flag, text, remedy)
        config = {MODEL: value} if value else {}
        if value.startswith("{"):
            config = read_as(dict[str, Any], f"{flag} {name}", value)
        method = config.setdefault(METHOD, name)
        if method not in list(Method):
            where = f"{flag}: {name}: {METHOD}" if value.startswith("{") else flag
            raise ConfigError.unknown(where, str(method), Method)
        if name in arms:
            remedy = f'two arms have this name; name one: \'NAME={{"method": "{method}", ...}}\''
            raise ConfigError.for_field(flag, name, remedy)
        arms[name] = config
    return arms


def with_arms(
    pair: ResolvedPair,
    choice: PairChoice,
    arms: Mapping[str, MethodArm],
    progress: OnProgress | None = None,
) -> ResolvedPair:
    """The pair with the models of these arms. Raises ConfigError and BenchError as `resolve_pair`
    does, with the arm's name."""
    resolved = {}
    for name, arm in arms.items():
        check_drafter(name, arm, choice)
        try:
            own = resolve_pair(
                choice.pair,
                target_model=choice.target_model,
                draft_model=arm.get(MODEL),
                method=arm.get(METHOD),
                progress=progress,
            )
        except ConfigError as error:
            raise error.within(f"arm {name}") from error
        resolved[name] = replace(own, speculative={**own.speculative, **entries_of(arm)})
    return replace(pair, arms=resolved)


def check_drafter(name: str, arm: MethodArm, choice: PairChoice) -> None:
    """Refuse an arm without the drafter that its method needs, before anything is fetched."""
    method = arm.get(METHOD)
    flag = "--arm" if _NAME.fullmatch(name) else "--against"
    if method is not None and method not in list(Method):
        raise ConfigError.unknown(flag, str(method), Method)
    own = None if choice.target_model else load_pair(choice.pair or DEFAULT_PAIR)
    has_drafter = own is not None and own.own_drafter and own.method == method
    if arm.get(MODEL) is None and not has_drafter and method not in WITHOUT_DRAFTER | FROM_TARGET:
        others = f", and {own.name}'s is for {own.method}" if own and own.own_drafter else ""
        remedy = f"{method} needs a drafter{others}: write {name}=FOLDER_OR_HUB_NAME"
        if flag == "--against":
            remedy = f'{method} needs a drafter{others}: write "model": "FOLDER_OR_HUB_NAME" too'
        raise ConfigError.for_field(flag, name, remedy)
