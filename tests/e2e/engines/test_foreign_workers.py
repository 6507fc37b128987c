"""Workers that join a running deployment and do not fit it: real processes that get nothing, `/admin/workers` says why."""

import re
import shutil
import signal
from contextlib import asynccontextmanager

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from penstock.core.ids import WorkerId
from penstock.core.types.instances import Role
from penstock.demo import MODEL_DIR, MODEL_NAME
from penstock.deploy.card import make_card, open_checkpoint
from penstock.deploy.messages import Beat, Phase, Ready, WorkerJob
from penstock.deploy.supervisor.child import Child
from penstock.graph import Graph

pytestmark = [pytest.mark.slow, pytest.mark.engine]

PROMPT = "Which parts does a request pass on its way, and what does each of them do with it? " * 6
TOKENS = 24
ROLE = {"engine": "paged", "weight_dtype": "float32", "kv_blocks": 512}
ROLES = {"prefill": ROLE, "decode": ROLE}
ALWAYS = {"policy": "least-loaded", "disagg": {"remote_tokens_min": 1}}
FIRST_ID = 900  # far beyond those that the supervisor gives


def by(*transports):
    return {"kv_transfer": {"transfer": {"transports": transports}}}


@asynccontextmanager
async def joined(site, role, **fields):
    """Start a worker of another graph under the deployment's hub, key and secret; give its name. It leaves by SIGTERM."""
    graph = Graph.model_validate({"model": "demo", "roles": ROLES} | fields)
    assignment = site.deployment.members[0]._assign()
    checkpoint = open_checkpoint(graph)
    job = WorkerJob(
        worker_id=WorkerId(FIRST_ID + list(Role).index(role)),
        role=role,
        card=make_card(checkpoint, graph, graph.roles.present()[role]),
        model_dir=str(checkpoint.path),
    )
    common = msgspec.structs.replace(assignment.common, graph_json=graph.model_dump_json())
    name = f"foreign-{role}"
    child = await Child.start(
        msgspec.structs.replace(assignment, name=name, job=job, common=common),
        site.deployment._guard,
        site.deployment.output,
    )
    try:
        while isinstance(report := await child.report(), Beat | Phase):
            pass
        assert isinstance(report, Ready), report

        async def is_connected():
            return bool((await site.workers()).get(name, {}).get("load"))

        await site.until(is_connected)
        yield name
        child.signal(signal.SIGTERM)
        assert await child.wait() == 0
    finally:
        child.kill()
        await child.wait()

    async def is_gone():
        return name not in await site.workers()

    await site.until(is_gone)


async def transferred(site):
    """Count the prompts that were computed elsewhere."""
    async with site.http.get(f"{site.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    name = 'penstock_router_prefills_total{place="remote"}'
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def ask(site, prompt):
    return (await site.tell(f"{prompt}: {PROMPT}", max_tokens=TOKENS))[0]


async def did_nothing(site, *names):
    workers = await site.workers()
    for name in names:
        load = workers[name]["load"]
        assert (load["steps"], load["prefilled_tokens"], load["generated_tokens"]) == (0, 0, 0), name
        assert workers[name]["open_requests"] == 0, name


@pytest.fixture
def other_weights(tmp_path):
    """A model of the demo model's name, files and shapes, which says something else."""
    path = tmp_path / "other"
    shutil.copytree(MODEL_DIR, path)
    weights = load_file(path / "model.safetensors")
    save_file({name: array.flip(-1) for name, array in weights.items()}, path / "model.safetensors")
    return {"model": str(path), "served_name": MODEL_NAME}


def test_other_blocks_or_weights_are_not_used_and_say_so(deploy, other_weights):
    cases = {
        "blocks": {"block_size": 32},
        "weights": other_weights,
    }
    reasons = {
        "blocks": "blocks of 32 tokens, the model's other workers have 16; it is used once these are gone",
        "weights": "salt [0-9a-f]{16}, the model's other workers have salt [0-9a-f]{16}: other weights, number formats or"
        " engine; it is used once these are gone",
    }

    async def scenario(site):
        during = {}
        for case, fields in cases.items():
            async with (
                joined(site, Role.PREFILL, **fields) as one,
                joined(site, Role.DECODE, **fields) as two,
            ):
                before = await transferred(site)
                for number in range(3):
                    during[f"{case} {number}"] = await ask(site, f"{case} {number}")
                assert await transferred(site) == before + 3
                await did_nothing(site, one, two)
                workers = await site.workers()
                for name in (one, two):
                    assert workers[name]["condition"] == "mismatched"
                    assert re.fullmatch(reasons[case], workers[name]["problem"])
                for name in ("prefill-1", "decode-1"):
                    assert (workers[name]["problem"], workers[name]["kv_transfer_problem"]) == (None, None)
        assert {prompt: await ask(site, prompt) for prompt in during} == during

    deploy(scenario, roles=ROLES, router=ALWAYS, timeout_s=400)


def test_who_shares_no_transport_is_handed_nothing_and_says_so(deploy):
    async def scenario(site):
        during = {}

        async def ask_and_compare(prompt, *, remote):
            before = await transferred(site)
            during[prompt] = await ask(site, prompt)
            assert await transferred(site) == before + remote

        async with joined(site, Role.PREFILL, worker=by("tcp")) as name:
            await ask_and_compare("prefill", remote=1)
            workers = await site.workers()
            why = "no transport in common: tcp there, shm here"
            assert workers[name]["kv_transfer_problem"] == (
                f"none of 1 workers can go on with its prompts; decode-1: {why}"
            )
            assert workers["decode-1"]["kv_transfer_problem"] is None, "prefill-1 hands it prompts"

            async def decode_has(problem):
                return (await site.workers())["decode-1"]["kv_transfer_problem"] == problem

            site.kill("prefill-1")
            alone = f"none of 1 workers can hand it prompts; {name}: {why}"
            await site.until(lambda: decode_has(alone))
            await ask_and_compare("alone", remote=0)
            await did_nothing(site, name)

            async def is_back():
                condition = (await site.workers()).get("prefill-1", {}).get("condition")
                return condition == "prefill_only" and await decode_has(None)

            await site.until(is_back)
            await ask_and_compare("back", remote=1)
            await did_nothing(site, name)
        async with joined(site, Role.DECODE, worker=by("tcp")) as name:
            for number in range(3):
                await ask_and_compare(f"decode {number}", remote=1)
            await did_nothing(site, name)
            assert (await site.workers())[name]["kv_transfer_problem"] == (
                "none of 1 workers can hand it prompts; prefill-1: no transport in common: shm there, tcp here"
            )
        assert {prompt: await ask(site, prompt) for prompt in during} == during

    deploy(scenario, roles=ROLES, router=ALWAYS, worker=by("shm"), timeout_s=400)
