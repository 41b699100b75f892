"""The vLLM plugin, found through the entry point `vllm.general_plugins`.

Without VLLM_NWOR_MODE, VLLM_SCV_MODE and VLLM_NWOR_DRAFTS in the environment, vLLM stays as it is.
"""

import logging

not_installed: str | None = None
"""Why the plugin is not installed in this process; vLLM then runs without it."""


def register() -> None:
    """Called by vLLM in every process; may be called more than once.

    Any error but wrong settings is logged, and vLLM runs without the plugin (`not_installed`).

    Raises:
        ConfigError: unknown mode in the environment, or an unsupported vLLM or device.
    """
    global not_installed
    from nwor_bench.plugin.settings import read_settings

    settings = read_settings()
    if settings is None:
        return
    from nwor_bench.errors import ConfigError
    from nwor_bench.instruments.versions import require_supported_vllm, untried_version

    require_supported_vllm()
    try:
        untried = untried_version()
        if untried is not None:
            logging.getLogger("vllm.nwor_bench").warning(untried)
        from nwor_bench.plugin.attaching import install
        from nwor_bench.plugin.observe.metrics import share_folder

        install(settings)
        share_folder()
    except ConfigError:
        raise
    except Exception as fault:
        not_installed = f"install:{type(fault).__name__} ({fault})"
        logging.getLogger("vllm.nwor_bench").exception(
            "nwor-bench could not be installed into vLLM, which runs without it"
        )
