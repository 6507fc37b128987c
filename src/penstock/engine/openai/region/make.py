"""Makes the engine of a link from the deployment's settings."""

from penstock.engine.openai.make import serving_of
from penstock.engine.openai.region.config import LinkConfig
from penstock.engine.openai.region.engine import RegionEngine
from penstock.engine.openai.region.server import RegionServer
from penstock.engine.openai.text import TextCodec
from penstock.engine.spec import EngineSpec


def make_link(spec: EngineSpec) -> RegionEngine:
    """Make the engine of the link that `spec.args` describe.

    Raises:
        ConfigError: an argument is wrong, or a file cannot be read.
    """
    config = LinkConfig.parse(dict(spec.args), source="regions")
    codec = TextCodec.open(spec.model)
    server = RegionServer(config, (*spec.model_names, spec.model), codec)
    return RegionEngine(server, config, serving_of(spec, codec))
