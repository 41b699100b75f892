"""The vLLM plugin: found through the entry point `vllm.general_plugins`.

Without VLLM_NWOR_MODE and VLLM_SCV_MODE in the environment `register` returns at once and
vLLM stays as it is.
"""


def register() -> None:
    """Called by vLLM in every process; may be called more than once.

    Raises:
        ConfigError: unknown mode in the environment, or an unsupported vLLM.
    """
    from nwor_bench.plugin.settings import read_settings

    settings = read_settings()
    if settings is None:
        return
    from nwor_bench.versions import require_supported_vllm

    require_supported_vllm()
    from nwor_bench.plugin.install import install
    from nwor_bench.plugin.metrics import share_folder

    install(settings)
    share_folder()
