"""Traces without the extra are refused with the fix, and without the setting nothing is imported."""

import asyncio
import subprocess
import sys

import pytest

from penstock.core.errors import ConfigError
from penstock.deploy.processes.tracing import tracing
from penstock.runtime import spans
from penstock.runtime.config import TracingConfig


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)

    async def main():
        async with tracing(TracingConfig(), "service", "process"):
            pass

    with pytest.raises(ConfigError, match=r"pip install 'penstock-llm\[otel\]'"):
        asyncio.run(main())
    assert not spans.is_recording()


@pytest.mark.slow
def test_without_the_setting_no_module_of_opentelemetry_is_imported():
    script = (
        "import asyncio, sys\n"
        "from penstock.deploy.processes import frontend_process, worker_process\n"
        "from penstock.deploy.processes.tracing import tracing\n"
        "async def main():\n"
        "    async with tracing(None, 's', 'p'): pass\n"
        "asyncio.run(main())\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
