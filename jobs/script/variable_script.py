"""Expressions of `jobs.script.expressions` as shell: the table of all tasks, and each role's variables.

`write_peers` runs once, in the batch script, when every task's address and ports are known; its
output and each role's file are plain sh, read inside the containers. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jobs.script.expressions import (
    EachHost,
    EachPort,
    EachPorts,
    Expression,
    Family,
    HostList,
    HostOf,
    Lit,
    MyHost,
    MyIndex,
    MyPort,
    MyPorts,
    Part,
    PortOf,
    Variable,
)
from jobs.script.variables import RuntimeVariables

Quote = Callable[[str], str]
Labels = Mapping[str, list[str]]  # role → labels of its ports, in the order of the port table
_Peer = HostOf | PortOf | HostList

_FUNCTIONS = """\
# peer ROLE INDEX: sets ip and p, the task's ports in the order of its role's labels.
peer() {
  ip=${address[$1.$2]}
  IFS=';' read -ra p <<<"${ports[$1.$2]}"
}

# peers ROLE PORT BEFORE AFTER SEPARATOR: sets list, all tasks of a role; PORT is a place in p or -.
peers() {
  local i entry p ip
  list=''
  for ((i = 0; i < role_tasks[$1]; i++)); do
    peer "$1" "$i"
    entry=$ip
    [[ $2 == - ]] || entry+=:${p[$2]%%,*}
    list+=${list:+$5}$3$entry$4
  done
}

# put NAME VALUE, keep NAME: a line for the tasks; only what is put is exported.
put() { printf "export %s='%s'\\n" "$1" "${2//\\'/\\'\\\\\\'\\'}"; }
keep() { printf "%s='%s'\\n" "$1" "${!1//\\'/\\'\\\\\\'\\'}"; }
"""


@dataclass(frozen=True, slots=True)
class PeerScript:
    """Bash that writes the table, and the names under which roles find what they need of it."""

    lines: tuple[str, ...]
    kept: dict[_Peer, str]

    @classmethod
    def build(cls, variables: RuntimeVariables, labels: Labels, quote: Quote) -> PeerScript:
        numbers = {role: number for number, role in enumerate(labels)}
        wanted = [
            part
            for variable in (*variables.everywhere, *_all(variables.by_role))
            for part in variable.value
            if isinstance(part, HostOf | PortOf | HostList)
        ]
        kept: dict[_Peer, str] = {}
        body: list[str] = []
        for part in dict.fromkeys(wanted):
            kept[part] = f"_sluice_peer_{len(kept)}"
            body += _keep(part, kept[part], numbers, labels, quote)
        for variable in variables.everywhere:
            value = "".join(_kept_or_text(part, kept, quote) for part in variable.value)
            body.append(f"put {quote(variable.name)} {value}")
        body += _families(variables.families, numbers, labels, quote)
        lines = [
            _FUNCTIONS,
            "# write_peers: the variables that name other tasks, the same for all of them.",
            "write_peers() {",
            "  local list i ip p",
            *(f"  {line}" for line in body),
            "}",
        ]
        return cls(tuple(lines), kept)


def _all(by_role: Mapping[str, tuple[Variable, ...]]) -> Iterable[Variable]:
    return (variable for variables in by_role.values() for variable in variables)


def _keep(
    part: _Peer, name: str, numbers: Mapping[str, int], labels: Labels, quote: Quote
) -> list[str]:
    role = numbers[part.role]
    if isinstance(part, HostList):
        port = str(labels[part.role].index(part.label)) if part.label else "-"
        words = " ".join(quote(word) for word in (part.before, part.after, part.separator))
        return [f"peers {role} {port} {words}", f"{name}=$list", f"keep {name}"]
    if isinstance(part, HostOf):
        return [f"{name}=${{address[{role}.{part.index}]}}", f"keep {name}"]
    port = str(labels[part.role].index(part.label))
    return [f"peer {role} {part.index}", f"{name}=${{p[{port}]%%,*}}", f"keep {name}"]


def _kept_or_text(part: Part, kept: Mapping[_Peer, str], quote: Quote) -> str:
    if isinstance(part, HostOf | PortOf | HostList):
        return f'"${kept[part]}"'
    if isinstance(part, Lit):
        return quote(part.text)
    raise TypeError(f"{part} differs between tasks")


def _families(
    families: tuple[Family, ...], numbers: Mapping[str, int], labels: Labels, quote: Quote
) -> list[str]:
    by_role: dict[str, list[Family]] = {}
    for family in families:
        by_role.setdefault(family.role, []).append(family)
    lines = []
    for role, members in by_role.items():
        number = numbers[role]
        lines.append(f"for ((i = 0; i < role_tasks[{number}]; i++)); do")
        lines.append(f'  peer {number} "$i"')
        for family in members:
            name = f'{quote(family.prefix)}"$i"{quote(family.suffix) if family.suffix else ""}'
            value = "".join(_each(part, labels[role], quote) for part in family.value)
            lines.append(f"  put {name} {value}")
        lines.append("done")
    return lines


def _each(part: Part, labels: list[str], quote: Quote) -> str:
    match part:
        case Lit(text):
            return quote(text)
        case EachHost():
            return '"$ip"'
        case EachPort(label):
            return f'"${{p[{labels.index(label)}]%%,*}}"'
        case EachPorts(label):
            return f'"${{p[{labels.index(label)}]}}"'
    raise TypeError(f"{part} has no meaning in a family")


def _mine(part: Part, labels: list[str], kept: Mapping[_Peer, str], quote: Quote) -> str:
    match part:
        case MyIndex(plus):
            return f"$((_sluice_index + {plus}))" if plus else '"$_sluice_index"'
        case MyHost():
            return '"$_sluice_ip"'
        case MyPort(label):
            return f'"${{_sluice_port_{labels.index(label)}%%,*}}"'
        case MyPorts(label):
            return f'"$_sluice_port_{labels.index(label)}"'
    return _kept_or_text(part, kept, quote)


def _value(expression: Expression, labels: list[str], peers: PeerScript, quote: Quote) -> str:
    return "".join(_mine(part, labels, peers.kept, quote) for part in expression) or "''"


def role_script(
    static: Mapping[str, str],
    directories: Mapping[str, str],
    variables: Iterable[Variable],
    labels: list[str],
    peers: PeerScript,
    quote: Quote,
) -> str:
    """The variables of one role, for enter.sh. Values of `static` and `directories` are shell words."""
    lines = [
        "# Variables of one role's tasks; read by enter.sh.",
        "# shellcheck shell=sh disable=SC2016,SC2154  # values are data; enter.sh sets what begins with _sluice",
        *(f"export {name}={word}" for name, word in static.items()),
        "# The job's directories.",
        *(f"export {name}={word}" for name, word in directories.items()),
        "# What depends on where the tasks run.",
        *(f"export {v.name}={_value(v.value, labels, peers, quote)}" for v in variables),
    ]
    return "\n".join(lines) + "\n"
