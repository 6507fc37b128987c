"""Print every message of the package's errors with its fix, from the source, as a page of Markdown."""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "penstock"
ERRORS = ROOT / "docs" / "errors.md"
ROOT_KIND = "PenstockError"
OWN_FIX = {"ConfigError", "RequestError", "Unavailable", ROOT_KIND}
"""Errors of so many causes that each message has to say its fix; those of the others share the fix of their code."""
AREAS = {
    "Commands and their flags": ("cli", "bench", "plan", "profiling", "sim", "doctor", "demo"),
    "Deployments and the host": ("core", "deploy"),
    "Graphs, planner and predictions": ("graph", "planner", "perf"),
    "Engines and KV": ("engine", "kv", "worker", "transfer"),
    "Requests, routing and registries": ("frontend", "router", "runtime"),
}
HEAD = """# Every message

The messages of commands and of answers to requests, without messages that only pass on another text, such as an operating system's reason. CAPITALS
and … stand for values. A code before a fix marks the fix of all errors with this code. `docs/errors.md` has codes, log events and the most frequent errors.
"""
"""The head of the page."""
FIXES = {
    r"^(Kubernetes|NATS|etcd) at .*registered": "give each worker its own name or namespace",
    r"^hub at ADDRESS: MESSAGE$": "do what the message of the first host says: it names the fix",
    r"^(Kubernetes|NATS|etcd)( at |: )": "look at the registry: it is away, slow or refuses; Penstock goes on and tries again",
    r"runs within a program": "end it there",
    r"^--run ITEM: 'NAME' is not in the graph": "name a role of the graph, `frontend` or `planner`",
    r"of a gateway": "leave it out: requests go through a gateway's own servers",
    r"takes no (images|MODALITY)": "leave them out, or use a model that takes them",
    r"got one of": "use only characters that the message names",
    r"required, but missing|not a URL|unknown field|refuses them|no valid form|not valid JSON|not a valid HTTP|body cannot be read": "mend the request's field that the message names",
    r"^(roles\.ROLE\.)?kv\.|^kv_layout|^worker\.kv_transfer|^NAME/|^kv: the (payload|weights)": "mend what the message names: a size, a path or a server of another version",
    r"^--api-key: ": "give a key of that server, or set `PENSTOCK_API_KEY`",
    r"^--model ?.*(: URL has no|answers)": "use a model of the server's `GET /v1/models`",
    r"^--burst: |first request failed|a trial request of one token failed|/v1/models in |no whole answer in ": "the reason is the server's: look at its log, then run it again",
    r"a trial request of one token got no answer": "look at the server's log, or raise `health.timeout_s`",
    r"cannot be written|cannot be read|access_log|not JSON|no UTF-8|not valid YAML|^(FILE|SOURCE|WHERE): line ": "mend that file, or its permissions, or name another",
    r"give one of|serve one of|name one of": "leave the others out",
    r"unknown flag|[Tt]here is no|unknown|is none of|not of|has no '|neither a URL|have printed|has printed nothing|no model|, which has|the server has|does not exist|no round's": "use one that the message or `--help` lists",
    r"^(PATH|FLAG): no round|has no graph|no time": "give a planner's log of this version with rounds, and a time such as 14:05",
    r"blocks of BLOCK_SIZE tokens do not fit|^kv_blocks: ": "lower it, or leave it out to have it chosen",
    r"does not come up|ended while it became|was stopped while it started|has ended|the connection ended|connection to it was closed|client is closed|Envoy sent more": "look at its log (`penstock logs`): it says why it ended",
    r"is of another host or user": "run that command there",
    r"pip install": "install it, or leave it out",
    r"no deployment": "start one with `penstock serve`, or name one that the message lists",
    r"no graph of this version|is of another version|no summary of prefixes|no list of models|no load of models|no counts|cannot be read: ERROR$": "run the same version on both sides",
    r"supervisor failed": "a defect: report it with the supervisor's log",
    r"kills no workers|takes no other graph|may not control": "run it as the deployment's user; `frontend.page.kills_workers` allows kills",
    r"takes no |are not allowed|at most .* allowed|adapters: at most|more than MOST|larger than|more than BODY": "send less or fewer",
    r"after DRAIN_TIMEOUT_S": "raise `drain_timeout_s`, or send the request again",
    r"not a tokenizer|chat template|tokenizer_config|weights cannot be|^engine vllm: MODEL|head_dim|layer_types": "mend the model's file that the message names, or download it again",
    r"api_key_file|endpoint_picker.tls": "name a file that can be read",
    r"cannot sleep": "leave the worker awake, or start it with what the message names",
    r"engine_args: ": "the message has the engine's own reason: set the argument so",
    r"serves '|no adapters by name": "name a model that the server serves",
    r"cannot be sent": "change the request as the engine's reason says",
    r"can only be set in a mapping": "set the whole mapping instead",
    r"\.profile: ": "measure the profile again with `penstock profile`",
    r"the engine placed": "use a model whose engine takes these media, or send other ones",
    r"may get this request|no server is known|counts what tenants|has not (answered|counted)": "start or undrain a worker; look at `GET /admin/workers`",
    r"not scaled|cannot be added|finds no room|decides how many": "free hosts or GPUs, raise `--max-workers`, or ask for fewer",
    r" already$": "nothing: it is so",
    r"is not ready|does not drain": "wait until it is ready, or choose another worker",
    r"vLLM refuses|token ids$": "change the request as the message says",
    r"it could not be made": "give the policy's class defaults for its arguments",
}
"""What to do about messages that do not say it themselves, by what is in them; the first that fits."""
_SAYS = re.compile(
    r", or |expected |must |needs |only (?:with|by|for|where)|try again|known: |known here|see "
)


@dataclass(frozen=True, order=True)
class Said:
    """A message as a template, and the area it belongs to."""

    area: str
    text: str
    code: str = ""
    """Whose fix it shares; empty for a message that has its own."""

    @property
    def cells(self) -> tuple[str, str]:
        """Give (what happened, what to do)."""
        happened, separator, fix = self.text.partition("; ")
        if separator:
            return happened, fix
        if _SAYS.search(self.text):
            return self.text, "as it says"
        if self.code:
            return self.text, f"`{self.code}`: {_fixes_by_code().get(self.code, '')}"
        return self.text, next((fix for words, fix in FIXES.items() if re.search(words, self.text)), "")


@cache
def _fixes_by_code() -> dict[str, str]:
    """Read the fixes of the answers' codes."""
    rows = (
        row.strip("|").split("|") for row in re.findall(r"(?m)^\| `.*$", ERRORS.read_text(encoding="utf-8"))
    )
    return {code: cells[-1].strip() for cells in rows for code in re.findall(r"`(\w+)`", cells[0])}


@cache
def messages() -> list[Said]:
    """Find all of them, each once, by area and text."""
    areas = {folder: area for area, folders in AREAS.items() for folder in folders}
    paths = sorted(SOURCES.rglob("*.py"))
    nodes = {path: list(ast.walk(ast.parse(path.read_text(encoding="utf-8")))) for path in paths}
    codes = _codes([node for each in nodes.values() for node in each])
    found: dict[tuple[str, str], Said] = {}
    for path in paths:
        if (area := areas.get(path.relative_to(SOURCES).parts[0])) is None:
            continue
        for node in nodes[path]:
            if isinstance(node, ast.Call) and node.args and (kind := _name(node.func)) in codes:
                for text in (" ".join(f"{_field(node)}{text}".split()) for text in _texts(node.args[0])):
                    said = Said(area, text, "" if kind in OWN_FIX else codes[kind])
                    if _is_one(text):
                        found[area, text] = min(said, found.get((area, text), said))
    return sorted(found.values())


def _codes(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Give the code of each error by its class, and of functions that make one of a message: those have their own fixes."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    codes, before = {ROOT_KIND: "internal_error"}, 0
    while len(codes) > before:
        before = len(codes)
        for each in classes:
            if (
                base := next((codes[_name(base)] for base in each.bases if _name(base) in codes), None)
            ) is not None:
                codes.setdefault(each.name, _own_code(each) or base)
    for each in nodes:
        if isinstance(each, ast.FunctionDef) and each.returns is not None and _name(each.returns) in codes:
            first = next((argument.arg for argument in each.args.args if argument.arg != "self"), "")
            codes.update({each.name: ""} if first == "message" else {})
    return codes


def _own_code(node: ast.ClassDef) -> str:
    for each in node.body:
        target = (
            each.target
            if isinstance(each, ast.AnnAssign)
            else each.targets[0]
            if isinstance(each, ast.Assign)
            else None
        )
        value = each.value if isinstance(each, ast.AnnAssign | ast.Assign) else None
        if isinstance(target, ast.Name) and target.id == "code" and isinstance(value, ast.Constant):
            return str(value.value)
    return ""


def _is_one(text: str) -> bool:
    """Tell whether a template says something itself, beside the values in it."""
    return " " in text and len(re.findall(r"[a-z]{2,}", text)) > 1


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _field(node: ast.Call) -> str:
    """Give the field that an error's message begins with; empty where it names none."""
    field = next((keyword.value for keyword in node.keywords if keyword.arg == "field"), None)
    if field is None:
        return ""
    return f"{next(_texts(field), None) or _part(ast.FormattedValue(field, -1))}: "


def _texts(node: ast.expr) -> Iterator[str]:
    """Give the templates that an expression may have as its value."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(_part(part) for part in parts)
        case ast.IfExp(body=body, orelse=orelse):
            yield from _texts(body)
            yield from _texts(orelse)
        case ast.BinOp(left=left, right=right, op=ast.Add()):
            for first in _texts(left):
                yield from (first + then for then in list(_texts(right)) or ["…"])


def _part(part: ast.expr) -> str:
    match part:
        case ast.Constant(value=str(text)):
            return text
        case ast.FormattedValue(value=value, conversion=conversion):
            name = _name(value).strip("_").upper()
            known = name if re.fullmatch("[A-Z][A-Z_]{2,}", name) else "…"
            return f"'{known}'" if conversion == ord("r") else known
    return "…"


def page() -> str:
    """Make the page."""
    parts, found = [HEAD], messages()
    for area in AREAS:
        rows = [said.cells for said in found if said.area == area]
        parts += [f"\n## {area}\n\n| message | fix |\n|---|---|\n"]
        parts += [f"| {_cell(happened)} | {_cell(fix)} |\n" for happened, fix in rows]
    return "".join(parts)


def _cell(text: str) -> str:
    """Escape what Markdown would read, outside of code."""
    parts = re.split("(`[^`]*`)", text.replace("|", "\\|"))
    parts[::2] = (re.sub(r"([\\*_<])(?!\|)", r"\\\1", part) for part in parts[::2])
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
