"""Records from SGLang's own sources the names and messages that engine `openai` uses: tests/data/sglang/recorded.json.

    pip download --no-deps sglang==0.5.23 && unzip sglang-*.whl -d sglang-wheel
    python tools/record_sglang_shapes.py sglang-wheel > tests/data/sglang/recorded.json

SGLang does not import without a GPU. So names are read from the syntax trees of its modules, and its classes of KV events and of
finish reasons, which need nothing else, are run by themselves: the messages are those that SGLang's own classes encode.
"""

import argparse
import ast
import enum
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

EVENTS = "sglang/srt/disaggregation/kv_events.py"
REASONS = "sglang/srt/managers/schedule_batch.py"
MANAGER = "sglang/srt/managers/tokenizer_manager.py"
NAMES = {
    "generate_request": ("sglang/srt/managers/io_struct.py", "GenerateReqInput"),
    "sampling_params": ("sglang/srt/sampling/sampling_params.py", "SamplingParams"),
    "completion_request": ("sglang/srt/entrypoints/openai/protocol.py", "CompletionRequest"),
    "chat_request": ("sglang/srt/entrypoints/openai/protocol.py", "ChatCompletionRequest"),
}
EVENT_CLASSES = (
    "EventBatch", "KVCacheEvent", "StorageMedium", "BlockStored", "BlockRemoved", "AllBlocksCleared", "KVEventBatch",
)  # fmt: skip
REASON_CLASSES = ("BaseFinishReason", "FINISH_MATCHED_TOKEN", "FINISH_LENGTH", "FINISH_ABORT")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="directory of the unpacked wheel")
    root = parser.parse_args().wheel
    (metadata,) = root.glob("sglang-*.dist-info/METADATA")
    version = next(
        line.split(":")[1].strip()
        for line in metadata.read_text().splitlines()
        if line.startswith("Version:")
    )
    recorded: dict[str, Any] = {
        "about": "Made by tools/record_sglang_shapes.py from the sources named in `from`; names are sorted, messages are msgpack in hex.",
        "version": version,
        "from": {name: f"{path}: {place}" for name, (path, place) in NAMES.items()}
        | {
            "meta_info": f"{MANAGER}: keys of meta_info",
            "finish_reasons": f"{REASONS}: {', '.join(REASON_CLASSES)}",
            "kv_events": f"{EVENTS}: {', '.join(EVENT_CLASSES)}",
            "fake_bootstrap_host": "sglang/srt/disaggregation/utils.py: FAKE_BOOTSTRAP_HOST",
        },
    }
    for name, (path, place) in NAMES.items():
        module = _parsed(root, path)
        recorded[name] = sorted({*_names(_found(module, place), module)})
    recorded["meta_info"] = sorted(_meta_keys(_parsed(root, MANAGER)))
    recorded["finish_reasons"] = _finish_reasons(root)
    recorded["kv_events"] = _kv_events(root)
    recorded["fake_bootstrap_host"] = _constant(
        _parsed(root, "sglang/srt/disaggregation/utils.py"), "FAKE_BOOTSTRAP_HOST"
    )
    json.dump(recorded, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


def _parsed(root: Path, path: str) -> ast.Module:
    return ast.parse((root / path).read_text())


def _found(tree: ast.AST, place: str) -> ast.AST:
    """Find a class or function by its dotted name."""
    for name in place.split("."):
        tree = next(node for node in ast.iter_child_nodes(tree) if getattr(node, "name", None) == name)
    return tree


def _names(node: ast.AST, module: ast.Module) -> Iterator[str]:
    """Yield a function's parameters, or the annotated fields of a class and of its bases in the same module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        arguments = node.args
        yield from (each.arg for each in (*arguments.args, *arguments.kwonlyargs) if each.arg != "self")
    elif isinstance(node, ast.ClassDef):
        known = {getattr(each, "name", None): each for each in module.body}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in known:
                yield from _names(known[base.id], module)
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield each.target.id


def _constant(tree: ast.Module, name: str) -> Any:
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise LookupError(name)


def _meta_keys(tree: ast.Module) -> set[str]:
    """Collect the keys with which `meta_info` is made, updated and assigned to."""
    keys: set[str] = set()

    def add(value: ast.AST) -> None:
        if isinstance(value, ast.Dict):
            keys.update(key.value for key in value.keys if isinstance(key, ast.Constant))

    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if getattr(target, "id", None) == "meta_info":
                    add(node.value)
                if isinstance(target, ast.Subscript) and getattr(target.value, "id", None) == "meta_info":
                    keys.update(
                        each.value for each in ast.walk(target.slice) if isinstance(each, ast.Constant)
                    )
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "meta_info.update" and node.args:
            add(node.args[0])
    return {key for key in keys if isinstance(key, str)}


def _run(root: Path, path: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Run the definitions of some classes of a module, and nothing else of it."""
    module = _parsed(root, path)
    body = [node for node in module.body if getattr(node, "name", None) in names]
    namespace: dict[str, Any] = {"msgspec": msgspec, "enum": enum, "__name__": path} | {
        name: getattr(typing, name) for name in ("Any", "Optional", "Union", "List", "Literal")
    }
    exec(compile(ast.Module(body, type_ignores=[]), path, "exec"), namespace)
    return namespace


def _finish_reasons(root: Path) -> dict[str, Any]:
    made = _run(root, REASONS, REASON_CLASSES)
    return {
        "stop": made["FINISH_MATCHED_TOKEN"](2).to_json(),
        "length": made["FINISH_LENGTH"](4).to_json(),
        "abort": made["FINISH_ABORT"]("no room", 400, "BadRequestError").to_json(),
    }


def _kv_events(root: Path) -> dict[str, Any]:
    """Encode batches with SGLang's own classes, as its publisher does."""
    made = _run(root, EVENTS, EVENT_CLASSES)
    medium = made["StorageMedium"]
    first = {"parent_block_hash": None, "block_size": 4, "lora_id": None, "medium": medium.GPU}
    stored = made["BlockStored"](block_hashes=[-5, 6], token_ids=[11, 12, 13, 14, 15, 16, 17, 18], **first)
    salted = made["BlockStored"](
        block_hashes=[7], token_ids=[11, 12, 13, 14], cache_salt="6162", session_id="s", **first
    )
    adapted = made["BlockStored"](block_hashes=[8], token_ids=[11, 12, 13, 14], lora_name="sql", **first)
    child = made["BlockStored"](
        block_hashes=[9], token_ids=[21, 22, 23, 24], **first | {"parent_block_hash": 6, "medium": medium.CPU}
    )
    removed = made["BlockRemoved"](block_hashes=[-5], medium=medium.GPU)
    batches = {
        "stored": [stored, salted, adapted, child],
        "removed": [removed],
        "cleared": [made["AllBlocksCleared"]()],
    }
    return {
        name: msgspec.msgpack.encode(made["KVEventBatch"](ts=1.0, events=events, attn_dp_rank=0)).hex()
        for name, events in batches.items()
    } | {"media": [each.value for each in medium]}


if __name__ == "__main__":
    sys.exit(main())
