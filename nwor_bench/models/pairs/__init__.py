"""Model pairs: a target and how its tokens are drafted.

Importing this loads neither torch nor vLLM; only building a packaged pair needs torch. Tests make
pairs of other shapes and noise with `pairs.tiny.generate_tiny`.
"""

from nwor_bench.models.pairs.cache import pair_folder
from nwor_bench.models.pairs.fetch import fetch_pair, resolve_pair
from nwor_bench.models.pairs.local import (
    check_hub_models,
    check_model_configs,
    read_model_config,
    refused_config,
)
from nwor_bench.models.pairs.pair import ModelPair, ResolvedPair, load_pair, pair_names
from nwor_bench.records.user_cache import cache_root
from nwor_bench.workload.run_spec import DEFAULT_PAIR

__all__ = [
    "DEFAULT_PAIR",
    "ModelPair",
    "ResolvedPair",
    "cache_root",
    "check_hub_models",
    "check_model_configs",
    "fetch_pair",
    "load_pair",
    "pair_folder",
    "pair_names",
    "read_model_config",
    "refused_config",
    "resolve_pair",
]
