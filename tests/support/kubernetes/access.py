"""Who may do what: tokens of service accounts have the rules that the store's RoleBindings give them, and nobody gives more than he has."""

import itertools
import secrets
from collections.abc import Iterator

from tests.support.kubernetes.problems import Refused
from tests.support.kubernetes.resources import Kind, Object
from tests.support.kubernetes.store import Name, Store

_RBAC = "rbac.authorization.k8s.io"
Rules = list[Object]
"""Rules of Roles; `namespace` of a rule is its Role's, all without."""


class Access:
    """Tokens and their rules. A token that is of no account and has no entry in `rules` may do everything."""

    def __init__(self, store: Store) -> None:
        self.rules: dict[str, Rules] = {}
        self._store = store
        self._accounts: dict[str, Name] = {}

    def token_of(self, namespace: str, account: str) -> str:
        """Make a token of a service account, as a kubelet asks for it when a pod starts; raises Refused where there is no such account."""
        self._store.get(self._kind("", "serviceaccounts"), (namespace, account))
        token = f"{namespace}-{account}-{secrets.token_hex(8)}"
        self._accounts[token] = (namespace, account)
        return token

    def check(self, token: str, verb: str, kind: Kind, subresource: str, name: Name) -> None:
        """Check that a token's owner may do something; raises Refused (403)."""
        rules = self._rules_of(token)
        resource = f"{kind.plural}/{subresource}" if subresource else kind.plural
        if rules is not None and not _allow(rules, verb, kind.group, resource, name):
            raise Refused(
                403,
                "Forbidden",
                f'{resource}{"." + kind.group if kind.group else ""} is forbidden: User "{self._user(token)}" cannot {verb} resource'
                f' "{resource}" in API group "{kind.group}" in the namespace "{name[0]}"',
            )

    def check_gift(self, token: str, kind: Kind, namespace: str, body: Object) -> None:
        """Check that who makes a Role, or binds one, has all that it gives; raises Refused (403)."""
        rules = self._rules_of(token)
        if rules is None or kind.group != _RBAC:
            return
        given = body.get("rules") or ()
        if kind.plural == "rolebindings":
            role = self._store.get(self._kind(_RBAC, "roles"), (namespace, body["roleRef"]["name"]))
            given = role.body.get("rules") or ()
        for rule in given:
            parts = (rule["apiGroups"], rule["resources"], rule["verbs"], rule.get("resourceNames", [""]))
            for group, resource, verb, name in itertools.product(*parts):
                if not _allow(rules, verb, group, resource, (namespace, name)):
                    raise Refused(
                        403,
                        "Forbidden",
                        f'{kind.plural}.{_RBAC} "{body["metadata"]["name"]}" is forbidden: user "{self._user(token)}" is attempting to'
                        f" grant RBAC permissions not currently held: {verb} {resource}.{group} {name}",
                    )

    def _rules_of(self, token: str) -> Rules | None:
        if (account := self._accounts.get(token)) is None:
            return self.rules.get(token)
        return list(self._bound(account))

    def _bound(self, account: Name) -> Iterator[Object]:
        subject = {"kind": "ServiceAccount", "namespace": account[0], "name": account[1]}
        for binding in self._store.all(self._kind(_RBAC, "rolebindings")):
            namespace = binding.body["metadata"]["namespace"]
            if any({"namespace": namespace, **each} == subject for each in binding.body["subjects"]):
                role = self._store.get(
                    self._kind(_RBAC, "roles"), (namespace, binding.body["roleRef"]["name"])
                )
                for rule in role.body["rules"]:
                    yield {**rule, "namespace": namespace}

    def _user(self, token: str) -> str:
        return "system:serviceaccount:" + ":".join(self._accounts.get(token, ("suite", "penstock")))

    def _kind(self, group: str, plural: str) -> Kind:
        kind = self._store.kinds.find(group, "v1", plural)
        assert kind is not None
        return kind


def _allow(rules: Rules, verb: str, group: str, resource: str, name: Name) -> bool:
    return any(
        group in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        and name[0] == rule.get("namespace", name[0])
        and name[1] in rule.get("resourceNames", [name[1]])
        for rule in rules
    )
