"""Tools of the Responses API as functions of a chat: those in namespaces, and those whose input is a text or a search."""

from typing import Any

import msgspec

from penstock.core.errors import RequestError
from penstock.frontend.openai.dialect import ClientTool
from penstock.frontend.openai.tools import check_tool, wrong

INPUT = "input"
"""The one parameter of the function that stands for a custom tool."""
_OF_KEYS = frozenset({"name", "description", "parameters", "strict"})


class Tools:
    """The functions of one body.

    Attributes:
        all: tools of a chat.
        of_client: what the client's calls look like, by function; functions without a namespace are left out.
    """

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.of_client: dict[str, ClientTool] = {}
        self._encoded: set[bytes] = set()

    def add(self, tool: dict[str, Any], where: str) -> None:
        """Take a tool of the body, or one that a search of the client's found.

        Raises:
            RequestError: it is malformed.
        """
        kind = tool.get("type")
        if kind == "custom":
            self._add_custom(tool, where)
        elif kind == "namespace":
            self._add_namespace(tool, where)
        elif kind == "tool_search" and tool.get("execution") == "client":
            function = {"description": tool.get("description"), "parameters": tool.get("parameters")}
            self._add_function(
                {"name": kind} | function, where, ClientTool(kind="tool_search_call", name=kind)
            )
        elif kind == "function":
            self._add_function(tool, where)
        else:
            self._take(
                {"type": kind} | {key: tool[key] for key in ("parameters", "function") if key in tool}, where
            )

    def choice(self, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Give `tool_choice` as chats have it."""
        if not isinstance(choice, dict) or "function" in choice:
            return choice
        if choice.get("type") != "allowed_tools":
            return self._named(choice)
        tools = choice.get("tools")
        if isinstance(tools, list):
            tools = [self._named(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}

    def _named(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind, name = choice.get("type"), choice.get("name")
        if not isinstance(kind, str) or kind not in {"function", "custom"}:
            return {"type": kind}
        if isinstance(name, str) and isinstance(namespace := choice.get("namespace"), str):
            name = function_name(namespace, name)
        return {"type": "function", "function": {"name": name}}

    def _add_custom(self, tool: dict[str, Any], where: str, namespace: str = "") -> None:
        form = tool.get("format")
        told = {"type": "string", "description": "The whole input of the tool, as plain text."}
        if isinstance(form, dict) and form.get("type") == "grammar":
            told["description"] += (
                f" It must match this {form.get('syntax')} grammar:\n{form.get('definition')}"
            )
        parameters = {"type": "object", "properties": {INPUT: told}, "required": [INPUT]}
        name = tool.get("name")
        self._add_function(
            {"name": name, "description": tool.get("description"), "parameters": parameters},
            where,
            ClientTool(kind="custom_tool_call", name=str(name), namespace=namespace),
        )

    def _add_namespace(self, tool: dict[str, Any], where: str) -> None:
        namespace, tools = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not namespace:
            raise wrong(f"{where}.name", namespace, "the name of a namespace")
        if not isinstance(tools, list):
            raise wrong(f"{where}.tools", tools, "a list of tools")
        for index, inner in enumerate(tools):
            place = f"{where}.tools[{index}]"
            kind = inner.get("type") if isinstance(inner, dict) else None
            if kind == "custom":
                self._add_custom(inner, place, namespace)
            elif kind == "function":
                client = ClientTool(kind="function_call", name=str(inner.get("name")), namespace=namespace)
                self._add_function(inner, place, client)
            else:
                raise wrong(f"{place}.type", kind, "'function' or 'custom'")

    def _add_function(self, tool: dict[str, Any], where: str, client: ClientTool | None = None) -> None:
        function = {key: value for key, value in tool.items() if key in _OF_KEYS and value is not None}
        if client is not None:
            if client.namespace and isinstance(tool.get("name"), str):
                function["name"] = function_name(client.namespace, client.name)
            self.of_client[str(function.get("name"))] = client
        self._take({"type": "function", "function": function}, where)

    def _take(self, tool: dict[str, Any], where: str) -> None:
        try:
            check_tool(tool, where)
        except RequestError as error:
            if error.param is not None:
                error.param = error.param.replace(".function", "")
                error.message = error.message.replace(".function", "", 1)
            raise
        encoded = msgspec.json.encode(tool)
        if encoded not in self._encoded:  # searches find a tool again
            self._encoded.add(encoded)
            self.all.append(tool)


def function_name(namespace: str | None, name: str) -> str:
    """Give the name of the function that stands for a tool of a namespace."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name
