"""How vLLM is started for a spec. Needs neither vLLM nor a checkpoint."""

import dataclasses

from penstock.engine.launch import EngineLaunch
from penstock.engine.launch_host import LaunchHost
from penstock.engine.spec import EngineSpec
from penstock.engine.vllm.kv_events import events_arguments
from penstock.engine.vllm.launch.arguments import VERSIONS, engine_arguments, environment
from penstock.engine.vllm.launch.nixl import transfer_config, transfer_environment, transfers_kv
from penstock.engine.vllm.tiers.settings import HASH_KEY, check_tiers, with_tiers


def engine_launch(spec: EngineSpec, host: LaunchHost) -> EngineLaunch:
    """Describe the start of vLLM's engine core.

    Raises:
        ConfigError: vLLM cannot have a setting, the graph sets an argument of Penstock's, or the host lacks what it needs.
    """
    variables = environment(spec, host)
    if transfers_kv(spec):
        variables |= transfer_environment(spec, host)
        spec = dataclasses.replace(spec, args={**spec.args, "kv_transfer_config": transfer_config(spec)})
    if spec.kv.present():
        check_tiers(spec)
        spec = with_tiers(spec, host)
        variables[HASH_KEY] = host.read("the deployment's hash key", spec.hash_key.hex)
    return EngineLaunch(
        call="vllm.AsyncEngineArgs",
        version=f"vLLM {VERSIONS}",
        arguments=engine_arguments(spec) | events_arguments(spec),
        environment=variables,
    )
