"""Checks of Slurm's daemons and permissions, of the work root, and of a compute node and its container runtime."""

from __future__ import annotations

import secrets
import time

from clusters.doctor.check_types import CheckContext, CheckFailed, CheckOutcome, FailureText
from clusters.errors import CommandTimeout, RemoteFileError, SlurmUnavailable
from clusters.models import Cluster, Namespace
from clusters.pyslurm_reader import PyslurmReader
from clusters.transport.base import FileToWrite, Transport
from core.messages import join_with_commas, msg

MIN_SLURM_VERSION, MAX_SLURM_VERSION = (22, 5), (26, 5)
# How long srun waits for a free core (--immediate), and how long the whole srun command may take.
SRUN_IMMEDIATE_S = 30
SRUN_TIMEOUT_S = 90.0
# On a network file system a new file becomes visible on other machines after a delay (NFS: up to acregmax).
FILE_VISIBLE_TIMEOUT_S = 20.0

# --- what is reported if a check does not pass ---------------------------------------------------

UNSUPPORTED_VERSION = FailureText(
    msg("doctor.slurm-outside-releases-sluice", "Slurm %(version)s is not a supported release."),
    msg(
        "doctor.supported-others-may-work",
        "Supported are 22.05 to 26.05. Others may work; test a job of each kind first.",
    ),
    CheckOutcome.WARN,
)
ALL_CONTROLLERS_DOWN = FailureText(
    msg("doctor.slurmctld-does-not-answer", "slurmctld at %(names)s does not respond."),
    msg("doctor.start-slurmctld-look-into", "Start slurmctld and check its log file."),
)
ONE_CONTROLLER_DOWN = FailureText(
    msg(
        "doctor.one-controllers-does-not",
        "One of the controllers does not respond: %(names)s.",
    ),
    msg("doctor.jobs-go-other-one", "Jobs continue on the other one. Start this one again."),
    CheckOutcome.WARN,
)
ACCOUNTING_DISABLED = FailureText(
    msg("doctor.slurm-accounting-switched-off", "Slurm's accounting is disabled."),
    msg(
        "doctor.sluice-learns-how-jobs",
        "Sluice reads job results from it. Set AccountingStorageType=accounting_storage/slurmdbd in slurm.conf and run slurmdbd.",
    ),
)
SLURMDBD_DOWN = FailureText(
    msg(
        "doctor.slurmdbd-does-not-answer",
        "slurmdbd does not respond. Jobs still run, but their results stay unknown until it is back.",
    ),
    msg(
        "doctor.start-slurmdbd-database-behind",
        "Start slurmdbd and its database, and check its log file.",
    ),
)
NOT_OPERATOR = msg(
    "doctor.no-operator-slurm-sees",
    "%(name)s is not a Slurm operator: it cannot see what PrivateData hides and cannot extend time limits.",
)
NO_NAMESPACE = FailureText(
    msg(
        "doctor.no-namespace-uses-cluster",
        "No namespace uses this cluster, so no jobs can be submitted.",
    ),
    msg(
        "doctor.manage-py-namespace-sync",
        "manage.py namespace sync %(name)s proposes one per partition.",
    ),
)
PARTITIONS_UNUSABLE = FailureText(
    msg("doctor.cluster", "%(problems)s. The cluster has: %(partitions)s."),
    msg(
        "doctor.correct-partitions-namespace-bring",
        "Correct the namespace's partitions, or set the partition up: scontrol update PartitionName=NAME State=UP",
    ),
)
WORK_ROOT_NOT_WRITABLE = FailureText(
    msg("doctor.cannot-write", "%(unix_user)s cannot write to %(root)s: %(reason)s"),
    msg(
        "doctor.make-directory-each-person",
        "Create the directory for each person (mode 0700, owned by them), raise their quota, or correct the cluster's “work root”.",
    ),
)
WORK_ROOT_NOT_READABLE = FailureText(
    msg("doctor.written-did-not-come", "A test file written to %(root)s could not be read back."),
    msg("doctor.look-file-system-state", "Check the file system."),
)
STEP_TIMEOUT = FailureText(
    msg(
        "doctor.step-partition-did-not",
        "A step in partition %(partition)s did not end within %(seconds)s s.",
    ),
    msg(
        "doctor.look-into-node-slurmd",
        "Check the node's slurmd log, and whether the work root's file system hangs there.",
    ),
)
NO_FREE_CORE = FailureText(
    msg(
        "doctor.no-core-partition-free",
        "No core of partition %(partition)s was free within %(seconds)s s.",
    ),
    msg("doctor.run-check-again-when", "Run the check again when the partition is less busy."),
    CheckOutcome.NOT_TRIED,
)
SRUN_FAILED = FailureText(
    msg("doctor.srun-namespace", "srun in namespace %(name)s: %(error)s"),
    msg(
        "doctor.slurm-words-say-why",
        "See Slurm's message. Common causes: the person has no association with the namespace's account (sacctmgr add user NAME account=ACCOUNT), or the nodes are down (sinfo -R).",
    ),
)
_SHARE_WORK_ROOT = msg(
    "doctor.work-root-must-same",
    "The work root must be the same directory on the login node and on all compute nodes: "
    "mount it there, or choose another “work root”.",
)
FILE_NOT_SEEN_ON_NODE = FailureText(
    msg(
        "doctor.node-does-not-see",
        "Node %(host)s does not see %(path)s, written on the login node.",
    ),
    _SHARE_WORK_ROOT,
)
NODE_CANNOT_WRITE = FailureText(
    msg("doctor.node-cannot-write", "Node %(host)s cannot write to %(directory)s."),
    _SHARE_WORK_ROOT,
)
FILE_OF_NODE_NOT_SEEN = FailureText(
    msg(
        "doctor.node-wrote-not-seen",
        "A file written on node %(host)s is not visible on the login node.",
    ),
    _SHARE_WORK_ROOT,
)
RUNTIME_UNUSABLE = FailureText(
    msg("doctor.does-not-run-node", "%(runtime)s does not run on node %(host)s: %(error)s"),
    msg(
        "doctor.install-all-compute-nodes",
        "Install it on all compute nodes and in the PATH of people's logins, or correct "
        "“container runtime” of the cluster (%(names)s).",
    ),
)
PYXIS_NOT_LOADED = FailureText(
    msg(
        "doctor.srun-no-container-image",
        "srun has no --container-image: Slurm does not load Pyxis.",
    ),
    msg(
        "doctor.add-plugstack-conf-login",
        "Add it to plugstack.conf on the login node and on all compute nodes.",
    ),
)

# --- checks of Slurm -----------------------------------------------------------------------------


def check_version(context: CheckContext) -> str:
    version = context.slurm().read_version()
    context.slurm_version = f"{version[0]}.{version[1]:02}.{version[2]}"
    if not MIN_SLURM_VERSION <= version[:2] <= MAX_SLURM_VERSION:
        raise CheckFailed(UNSUPPORTED_VERSION, version=context.slurm_version)
    return msg("doctor.slurm", "Slurm %(version)s", version=context.slurm_version)


def check_controller(context: CheckContext) -> str:
    controllers = context.slurm().ping()
    down = [controller.host for controller in controllers if not controller.up]
    if len(down) == len(controllers):
        raise CheckFailed(ALL_CONTROLLERS_DOWN, names=", ".join(down))
    if down:
        raise CheckFailed(ONE_CONTROLLER_DOWN, names=", ".join(down))
    return msg(
        "doctor.slurmctld-answers",
        "slurmctld at %(names)s responds",
        names=", ".join(controller.host for controller in controllers),
    )


def check_pyslurm(context: CheckContext) -> str:
    capacity = PyslurmReader(context.cluster.slurm_conf).read_capacity()
    return msg(
        "doctor.reads-nodes-partitions",
        "reads %(count)s nodes and %(partitions)s partitions",
        count=len(capacity.nodes),
        partitions=len(capacity.partitions),
    )


def check_accounting(context: CheckContext) -> str:
    slurm = context.slurm()
    if not slurm.read_config().accounting:
        raise CheckFailed(ACCOUNTING_DISABLED)
    try:
        context.slurm_users = slurm.list_users()
    except SlurmUnavailable as error:
        raise CheckFailed(SLURMDBD_DOWN) from error
    return msg(
        "doctor.slurmdbd-answers-users",
        "slurmdbd responds, %(count)s users",
        count=len(context.slurm_users),
    )


def check_operator(context: CheckContext) -> str:
    name = context.service_transport().user
    slurm_user = next((user for user in context.slurm_users if user.name == name), None)
    if slurm_user is None or not slurm_user.is_operator:
        remedy = f"sacctmgr modify user {name} set AdminLevel=Operator"
        if slurm_user is None:
            remedy = f"sacctmgr add user {name} account=ACCOUNT; {remedy}"
        raise CheckFailed(FailureText(NOT_OPERATOR, remedy), name=name)
    return msg(
        "doctor.is", "%(name)s is %(level)s", name=name, level=slurm_user.admin_level.lower()
    )


def check_partitions(context: CheckContext) -> str:
    up = {partition.name: partition.up for partition in context.slurm().read_capacity().partitions}
    if not context.namespaces:
        raise CheckFailed(NO_NAMESPACE, name=context.cluster.name)
    problems = [
        msg(
            "doctor.not-up",
            "%(namespace)s: %(partition)s is not up",
            namespace=namespace.name,
            partition=name,
        )
        if name in up
        else msg(
            "doctor.not",
            "%(namespace)s: %(partition)s does not exist",
            namespace=namespace.name,
            partition=name,
        )
        for namespace in context.namespaces
        for name in namespace.partitions
        if not up.get(name)
    ]
    if problems:
        raise CheckFailed(
            PARTITIONS_UNUSABLE, problems=join_with_commas(problems), partitions=", ".join(up)
        )
    used = sorted({name for namespace in context.namespaces for name in namespace.partitions})
    return msg(
        "doctor.namespaces",
        "%(names)s for %(count)s namespaces",
        names=", ".join(used),
        count=len(context.namespaces),
    )


# --- files and nodes ---------------------------------------------------------------------------


def check_work_root(context: CheckContext) -> str:
    assert context.account is not None  # noqa: S101 - set by check_accounts, which is required
    root = context.cluster.work_root_for(context.unix_user, context.account.home)
    token = secrets.token_hex(8)
    path = f"{root}/.sluice-check-{token}"
    transport = context.user_transport()
    try:
        transport.write_files(root, [FileToWrite(path.rpartition("/")[2], token.encode())])
        context.test_file = path
        read_back = transport.read_at(path, 0, 100)
    except RemoteFileError as error:
        raise CheckFailed(
            WORK_ROOT_NOT_WRITABLE,
            unix_user=context.unix_user,
            root=root,
            reason=error.user_message,
        ) from error
    if read_back != token.encode():
        raise CheckFailed(WORK_ROOT_NOT_READABLE, root=root)
    return msg(
        "doctor.can-written",
        "%(root)s can be written by %(unix_user)s",
        root=root,
        unix_user=context.unix_user,
    )


# Runs on a compute node and prints one "key value" pair per line. $1: path of the test file, $2: its content, $3: the
# container runtime, $4: the runtime's program.
_NODE_SCRIPT = """
echo "host ${SLURMD_NODENAME:-$(hostname)}"
if [ "$(cat -- "$1" 2>/dev/null)" = "$2" ]; then echo "seen yes"; else echo "seen no"; fi
if (printf %s "$2" > "$1.back") 2>/dev/null; then echo "wrote yes"; else echo "wrote no"; fi
case "$3" in
  none) echo "runtime none" ;;
  enroot|pyxis) echo "runtime $("$4" version 2>&1 | head -n1)" ;;
  *) echo "runtime $("$4" --version 2>&1 | head -n1)" ;;
esac
"""


def check_compute_node(context: CheckContext) -> str:
    token = context.test_file.rpartition("-")[2]
    namespace = context.namespaces[0]
    options = {
        "--job-name": f"sluice-check-{token}",
        "--partition": namespace.partitions[0],
        "--account": namespace.account,
        "--qos": namespace.qos,
        "--constraint": namespace.constraint,
        "--time": "2",
        "--immediate": str(SRUN_IMMEDIATE_S),
        "--chdir": "/",
    }
    runtime = context.cluster.runtime
    default_program = "enroot" if runtime == Cluster.Runtime.PYXIS else runtime
    program = context.cluster.runtime_program or default_program
    argv = context.commands.action_argv(
        "srun",
        "--quiet",
        "--ntasks=1",
        *(f"{name}={value}" for name, value in options.items() if value),
        *("sh", "-c", _NODE_SCRIPT, "sh", context.test_file, token, runtime, program),
    )
    transport = context.user_transport()
    try:
        result = transport.run(argv, timeout_s=SRUN_TIMEOUT_S)
    except CommandTimeout as error:
        transport.run(context.commands.action_argv("scancel", f"--name=sluice-check-{token}"))
        raise CheckFailed(
            STEP_TIMEOUT, partition=namespace.partitions[0], seconds=f"{SRUN_TIMEOUT_S:.0f}"
        ) from error
    context.node_report = dict(
        line.split(" ", 1) for line in result.text.splitlines() if " " in line
    )
    if "host" not in context.node_report:
        raise _srun_failure(namespace, result.error_text)
    return _check_node_report(context, transport, token)


def _srun_failure(namespace: Namespace, stderr: str) -> CheckFailed:
    # Messages of srun --immediate when its time is up (22.05 to 25.11).
    if "Requested nodes are busy" in stderr or "Immediate execution impossible" in stderr:
        return CheckFailed(
            NO_FREE_CORE, partition=namespace.partitions[0], seconds=SRUN_IMMEDIATE_S
        )
    last_line = (
        stderr.splitlines()[-1]
        if stderr
        else msg("doctor.srun-said-nothing", "srun printed nothing")
    )
    return CheckFailed(SRUN_FAILED, name=namespace.name, error=last_line)


def _check_node_report(context: CheckContext, transport: Transport, token: str) -> str:
    host, path = context.node_report["host"], context.test_file
    if context.node_report.get("seen") != "yes":
        raise CheckFailed(FILE_NOT_SEEN_ON_NODE, host=host, path=path)
    if context.node_report.get("wrote") != "yes":
        raise CheckFailed(NODE_CANNOT_WRITE, host=host, directory=path.rpartition("/")[0])
    deadline = time.monotonic() + FILE_VISIBLE_TIMEOUT_S
    while True:
        try:
            if transport.read_at(f"{path}.back", 0, 100) == token.encode():
                return msg(
                    "doctor.node-reads-writes", "node %(host)s reads and writes it", host=host
                )
        except RemoteFileError:
            pass
        if time.monotonic() > deadline:
            raise CheckFailed(FILE_OF_NODE_NOT_SEEN, host=host)
        time.sleep(0.5)


def check_runtime(context: CheckContext) -> str:
    runtime, host = context.cluster.runtime, context.node_report["host"]
    version = context.node_report.get("runtime", "")
    if runtime == Cluster.Runtime.NONE:
        return msg("doctor.none-wanted-commands-run", "not used: commands run on the node itself")
    if not any(letter.isdigit() for letter in version) or "not found" in version:
        raise CheckFailed(
            RUNTIME_UNUSABLE,
            runtime=runtime,
            host=host,
            error=version[:200] or msg("doctor.no-answer", "no response"),
            names=", ".join(Cluster.Runtime.values),
        )
    if runtime == Cluster.Runtime.PYXIS:
        srun_help = context.service_transport().run(context.commands.action_argv("srun", "--help"))
        if "--container-image" not in srun_help.text:
            raise CheckFailed(PYXIS_NOT_LOADED)
    return msg("doctor.node", "%(version)s on node %(host)s", version=version, host=host)
