"""Expressions of `jobs.script.expressions` as shell: the table of all tasks, and each role's variables.

`write_peers` runs once, in the batch script, when every task's address and ports are known; its
output and each role's file are plain sh, read inside the containers. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from jobs.script.expressions import (
    CurrentHost,
    CurrentIndex,
    CurrentPort,
    CurrentPorts,
    Expression,
    ExpressionPart,
    FamilyHost,
    FamilyPort,
    FamilyPorts,
    HostList,
    LiteralText,
    TaskHost,
    TaskPort,
    Variable,
    VariableFamily,
)
from jobs.script.variables import RuntimeVariables

Quote = Callable[[str], str]
Labels = Mapping[str, list[str]]  # role → labels of its ports, in the order of the port table
_PeerReference = TaskHost | TaskPort | HostList

_FUNCTIONS = """\
# load_peer ROLE INDEX: sets ip and p, the task's ports in the order of its role's labels.
load_peer() {
  ip=${address[$1.$2]}
  IFS=';' read -ra p <<<"${ports[$1.$2]}"
}

# list_peers ROLE PORT BEFORE AFTER SEPARATOR: sets list, all tasks of a role; PORT is a place in p or -.
list_peers() {
  local i entry p ip
  list=''
  for ((i = 0; i < role_tasks[$1]; i++)); do
    load_peer "$1" "$i"
    entry=$ip
    [[ $2 == - ]] || entry+=:${p[$2]%%,*}
    list+=${list:+$5}$3$entry$4
  done
}

# emit_export NAME VALUE, emit_variable NAME: a line for the tasks; only the first exports.
emit_export() { printf "export %s='%s'\\n" "$1" "${2//\\'/\\'\\\\\\'\\'}"; }
emit_variable() { printf "%s='%s'\\n" "$1" "${!1//\\'/\\'\\\\\\'\\'}"; }
"""


@dataclass(frozen=True, slots=True)
class PeerScript:
    """Bash that writes the table, and the names under which roles find what they need of it."""

    lines: tuple[str, ...]
    peer_variables: dict[_PeerReference, str]

    @classmethod
    def build(cls, variables: RuntimeVariables, labels: Labels, quote: Quote) -> PeerScript:
        numbers = {role: number for number, role in enumerate(labels)}
        references = [
            part
            for variable in (*variables.shared, *_iter_variables(variables.by_role))
            for part in variable.value
            if isinstance(part, TaskHost | TaskPort | HostList)
        ]
        peer_variables: dict[_PeerReference, str] = {}
        body: list[str] = []
        for part in dict.fromkeys(references):
            peer_variables[part] = f"_sluice_peer_{len(peer_variables)}"
            body += _render_peer_variable(part, peer_variables[part], numbers, labels, quote)
        for variable in variables.shared:
            value = "".join(
                _render_shared_part(part, peer_variables, quote) for part in variable.value
            )
            body.append(f"emit_export {quote(variable.name)} {value}")
        body += _render_families(variables.families, numbers, labels, quote)
        lines = [
            _FUNCTIONS,
            "# write_peers: the variables that name other tasks, the same for all of them.",
            "write_peers() {",
            "  local list i ip p",
            *(f"  {line}" for line in body),
            "}",
        ]
        return cls(tuple(lines), peer_variables)


def _iter_variables(by_role: Mapping[str, tuple[Variable, ...]]) -> Iterable[Variable]:
    return (variable for variables in by_role.values() for variable in variables)


def _render_peer_variable(
    part: _PeerReference, name: str, numbers: Mapping[str, int], labels: Labels, quote: Quote
) -> list[str]:
    role = numbers[part.role]
    if isinstance(part, HostList):
        port = str(labels[part.role].index(part.label)) if part.label else "-"
        words = " ".join(quote(word) for word in (part.before, part.after, part.separator))
        return [f"list_peers {role} {port} {words}", f"{name}=$list", f"emit_variable {name}"]
    if isinstance(part, TaskHost):
        return [f"{name}=${{address[{role}.{part.index}]}}", f"emit_variable {name}"]
    port = str(labels[part.role].index(part.label))
    return [f"load_peer {role} {part.index}", f"{name}=${{p[{port}]%%,*}}", f"emit_variable {name}"]


def _render_shared_part(
    part: ExpressionPart, peer_variables: Mapping[_PeerReference, str], quote: Quote
) -> str:
    if isinstance(part, TaskHost | TaskPort | HostList):
        return f'"${peer_variables[part]}"'
    if isinstance(part, LiteralText):
        return quote(part.text)
    raise TypeError(f"{part} differs between tasks")


def _render_families(
    families: tuple[VariableFamily, ...], numbers: Mapping[str, int], labels: Labels, quote: Quote
) -> list[str]:
    by_role: dict[str, list[VariableFamily]] = {}
    for family in families:
        by_role.setdefault(family.role, []).append(family)
    lines = []
    for role, members in by_role.items():
        number = numbers[role]
        lines.append(f"for ((i = 0; i < role_tasks[{number}]; i++)); do")
        lines.append(f'  load_peer {number} "$i"')
        for family in members:
            name = f'{quote(family.prefix)}"$i"{quote(family.suffix) if family.suffix else ""}'
            value = "".join(_render_family_part(part, labels[role], quote) for part in family.value)
            lines.append(f"  emit_export {name} {value}")
        lines.append("done")
    return lines


def _render_family_part(part: ExpressionPart, labels: list[str], quote: Quote) -> str:
    match part:
        case LiteralText(text):
            return quote(text)
        case FamilyHost():
            return '"$ip"'
        case FamilyPort(label):
            return f'"${{p[{labels.index(label)}]%%,*}}"'
        case FamilyPorts(label):
            return f'"${{p[{labels.index(label)}]}}"'
    raise TypeError(f"{part} has no meaning in a family")


def _render_task_part(
    part: ExpressionPart,
    labels: list[str],
    peer_variables: Mapping[_PeerReference, str],
    quote: Quote,
) -> str:
    match part:
        case CurrentIndex(offset):
            return f"$((_sluice_index + {offset}))" if offset else '"$_sluice_index"'
        case CurrentHost():
            return '"$_sluice_ip"'
        case CurrentPort(label):
            return f'"${{_sluice_port_{labels.index(label)}%%,*}}"'
        case CurrentPorts(label):
            return f'"$_sluice_port_{labels.index(label)}"'
    return _render_shared_part(part, peer_variables, quote)


def _render_expression(
    expression: Expression, labels: list[str], peers: PeerScript, quote: Quote
) -> str:
    return (
        "".join(_render_task_part(part, labels, peers.peer_variables, quote) for part in expression)
        or "''"
    )


def render_role_script(
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
        *(
            f"export {v.name}={_render_expression(v.value, labels, peers, quote)}"
            for v in variables
        ),
    ]
    return "\n".join(lines) + "\n"
