"""Schemathesis makes requests from the OpenAPI document: none ends in a 5xx, hangs, or has an answer of another shape than it says."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest
from frontend_site import serving

from tests.support.clients import run_command
from tests.support.tool_talk import agent

CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance"


@pytest.mark.slow
@pytest.mark.needs("schemathesis clients")
@pytest.mark.within(240)
async def test_every_operation_holds_its_own_description(tmp_path: Path) -> None:
    async with serving(dispatcher=agent(), batches={"directory": str(tmp_path / "batches")}) as site:
        batches = asyncio.ensure_future(site.server.watch())
        document = json.loads((await site.ask("GET", "/openapi.json")).body)
        for kind in document["components"]["schemas"].values():
            fields = kind.get("properties", {})
            if fields.keys() & {"messages", "prompt", "input"}:
                fields["model"] = {"const": "tiny"}  # or nothing would be found to be answered
        described = tmp_path / "openapi.json"
        described.write_text(json.dumps(document))
        said = await run_command(
            "schemathesis",
            [
                "run", str(described), "--url", f"http://127.0.0.1:{site.port}", "--checks", CHECKS, "--no-color",
                "--max-examples", "4", "--phases", "examples,coverage,fuzzing", "--request-timeout", "20", "--seed", "1",
            ],
            command="schemathesis",
            folder=tmp_path,
            timeout_s=200,
        )  # fmt: skip
        batches.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await batches
    tested = re.search(r"Test cases:\s+([0-9]+) generated", said)
    assert tested, said
    assert int(tested[1]) > 2000, said
    answered = {request.request_id.partition("-")[0] for request in site.dispatcher.opened}
    assert answered >= {"cmpl", "embd"}, answered  # a random role makes no chat
