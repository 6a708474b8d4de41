"""The links behind the login node: Slurm's daemons and rights, files, a compute node and its containers."""

from __future__ import annotations

import secrets
import time

from clusters.doctor.checks import Fault, Outcome, Patient
from clusters.errors import CommandTimeout, RemoteFileError, SlurmUnavailable
from clusters.models import Cluster, Namespace
from clusters.pyslurm_reader import PyslurmReader
from clusters.transport.base import FileToWrite, Transport
from core.messages import _, joined

OLDEST_SLURM, NEWEST_SLURM = (22, 5), (26, 5)
# How long a free core is waited for, and how long the whole step may take.
IMMEDIATE_S = 30
STEP_TIMEOUT_S = 90.0
# Network file systems show a new file on another machine with a delay (NFS: up to acregmax).
SEEN_TIMEOUT_S = 20.0


def check_version(patient: Patient) -> str:
    version = patient.slurm().version()
    patient.slurm_version = f"{version[0]}.{version[1]:02}.{version[2]}"
    if not OLDEST_SLURM <= version[:2] <= NEWEST_SLURM:
        raise Fault(
            _(
                "Slurm %(version)s is outside the releases that Sluice was made for.",
                version=patient.slurm_version,
            ),
            _("22.05 to 26.05 are supported. Others may work: try a job of each kind first."),
            Outcome.WARN,
        )
    return _("Slurm %(version)s", version=patient.slurm_version)


def check_controller(patient: Patient) -> str:
    controllers = patient.slurm().ping()
    down = [controller for controller in controllers if not controller.up]
    if len(down) == len(controllers):
        raise Fault(
            _(
                "slurmctld at %(names)s does not answer.",
                names=", ".join(controller.host for controller in down),
            ),
            _("Start slurmctld, and look into its log file."),
        )
    if down:
        raise Fault(
            _(
                "One of the controllers does not answer: %(names)s.",
                names=", ".join(one.host for one in down),
            ),
            _("Jobs go on with the other one; start it again."),
            Outcome.WARN,
        )
    return _(
        "slurmctld at %(names)s answers",
        names=", ".join(controller.host for controller in controllers),
    )


def check_pyslurm(patient: Patient) -> str:
    capacity = PyslurmReader(patient.cluster.slurm_conf).capacity()
    return _(
        "reads %(count)s nodes and %(partitions)s partitions",
        count=len(capacity.nodes),
        partitions=len(capacity.partitions),
    )


def check_accounting(patient: Patient) -> str:
    slurm = patient.slurm()
    if not slurm.config().accounting:
        raise Fault(
            _("Slurm's accounting is switched off."),
            _(
                "Sluice learns from it how jobs ended: set "
                "AccountingStorageType=accounting_storage/slurmdbd in slurm.conf and run slurmdbd."
            ),
        )
    try:
        patient.slurm_users = slurm.users()
    except SlurmUnavailable as error:
        raise Fault(
            _(
                "slurmdbd does not answer: jobs still run and are watched, but how they ended stays "
                "unknown until it is back."
            ),
            _("Start slurmdbd (and the database behind it), and look into its log file."),
        ) from error
    return _("slurmdbd answers, %(count)s users", count=len(patient.slurm_users))


def check_operator(patient: Patient) -> str:
    name = patient.service().user
    known = next((user for user in patient.slurm_users if user.name == name), None)
    if known is None or not known.is_operator:
        raise Fault(
            _(
                "%(name)s is no operator of Slurm: it sees nothing of what PrivateData hides, and "
                "cannot lengthen a time limit.",
                name=name,
            ),
            f"sacctmgr modify user {name} set AdminLevel=Operator"
            if known
            else f"sacctmgr add user {name} account=ACCOUNT; "
            f"sacctmgr modify user {name} set AdminLevel=Operator",
        )
    return _("%(name)s is %(level)s", name=name, level=known.admin_level.lower())


def check_partitions(patient: Patient) -> str:
    up = {partition.name: partition.up for partition in patient.slurm().capacity().partitions}
    if not patient.namespaces:
        raise Fault(
            _("No namespace uses this cluster: nobody can submit."),
            _(
                "manage.py namespace sync %(name)s proposes one per partition.",
                name=patient.cluster.name,
            ),
        )
    problems = [
        _("%(namespace)s: %(partition)s is not up", namespace=namespace.name, partition=name)
        if name in up
        else _(
            "%(namespace)s: %(partition)s is not there", namespace=namespace.name, partition=name
        )
        for namespace in patient.namespaces
        for name in namespace.partitions
        if not up.get(name)
    ]
    if problems:
        raise Fault(
            _(
                "%(problems)s. The cluster has: %(partitions)s.",
                problems=joined(problems),
                partitions=", ".join(up),
            ),
            _(
                "Correct the partitions of the namespace, or bring the partition up: scontrol update "
                "PartitionName=NAME State=UP"
            ),
        )
    used = sorted({name for namespace in patient.namespaces for name in namespace.partitions})
    return _(
        "%(names)s for %(count)s namespaces", names=", ".join(used), count=len(patient.namespaces)
    )


# --- files and nodes ---------------------------------------------------------------------------


def check_work_root(patient: Patient) -> str:
    assert patient.account is not None  # noqa: S101 - a needed link
    root = patient.cluster.work_root_for(patient.unix_user, patient.account.home)
    token = secrets.token_hex(8)
    path = f"{root}/.sluice-check-{token}"
    transport = patient.person()
    try:
        transport.write_files(root, [FileToWrite(path.rpartition("/")[2], token.encode())])
        patient.check_file = path
        back = transport.read_at(path, 0, 100)
    except RemoteFileError as error:
        raise Fault(
            _(
                "%(unix_user)s cannot write to %(root)s: %(reason)s",
                unix_user=patient.unix_user,
                root=root,
                reason=error.user_message,
            ),
            _(
                "Make the directory for each person (0700, their own), mend their quota, or correct "
                "“work root” of the cluster."
            ),
        ) from error
    if back != token.encode():
        raise Fault(
            _("What was written to %(root)s did not come back.", root=root),
            _("Look at that file system's state."),
        )
    return _("%(root)s can be written by %(unix_user)s", root=root, unix_user=patient.unix_user)


# Prints one word a line. Paths and the token are arguments, never part of the program.
_STEP = """
echo "host ${SLURMD_NODENAME:-$(hostname)}"
if [ "$(cat -- "$1" 2>/dev/null)" = "$2" ]; then echo "seen yes"; else echo "seen no"; fi
if (printf %s "$2" > "$1.back") 2>/dev/null; then echo "wrote yes"; else echo "wrote no"; fi
case "$3" in
  none) echo "runtime none" ;;
  enroot|pyxis) echo "runtime $("$4" version 2>&1 | head -n1)" ;;
  *) echo "runtime $("$4" --version 2>&1 | head -n1)" ;;
esac
"""


def check_compute_node(patient: Patient) -> str:
    token = patient.check_file.rpartition("-")[2]
    namespace = patient.namespaces[0]
    options = {
        "--job-name": f"sluice-check-{token}",
        "--partition": namespace.partitions[0],
        "--account": namespace.account,
        "--qos": namespace.qos,
        "--constraint": namespace.constraint,
        "--time": "2",
        "--immediate": str(IMMEDIATE_S),
        "--chdir": "/",
    }
    runtime = patient.cluster.runtime
    pyxis_needs = "enroot" if runtime == Cluster.Runtime.PYXIS else runtime
    program = patient.cluster.runtime_program or pyxis_needs
    argv = patient.commands.acting(
        "srun",
        "--quiet",
        "--ntasks=1",
        *(f"{name}={value}" for name, value in options.items() if value),
        *("sh", "-c", _STEP, "sh", patient.check_file, token, runtime, program),
    )
    transport = patient.person()
    try:
        result = transport.run(argv, timeout_s=STEP_TIMEOUT_S)
    except CommandTimeout as error:
        transport.run(patient.commands.acting("scancel", f"--name=sluice-check-{token}"))
        raise Fault(
            _(
                "A step in partition %(partition)s did not end within %(seconds)s s.",
                partition=namespace.partitions[0],
                seconds=f"{STEP_TIMEOUT_S:.0f}",
            ),
            _("Look into the node's slurmd log; is the work root's file system hanging there?"),
        ) from error
    patient.node_words = dict(
        line.split(" ", 1) for line in result.text.splitlines() if " " in line
    )
    if "host" not in patient.node_words:
        raise _step_fault(namespace, result.error_text)
    return _read_step(patient, transport, token)


def _step_fault(namespace: Namespace, words: str) -> Fault:
    last = words.splitlines()[-1] if words else _("srun said nothing")
    # What srun --immediate says when its time is up (22.05 to 25.11).
    if "Requested nodes are busy" in words or "Immediate execution impossible" in words:
        return Fault(
            _(
                "No core of partition %(partition)s was free within %(seconds)s s.",
                partition=namespace.partitions[0],
                seconds=IMMEDIATE_S,
            ),
            _("Run the check again when the partition is less busy."),
            Outcome.NOT_TRIED,
        )
    return Fault(
        _("srun in namespace %(name)s: %(last)s", name=namespace.name, last=last),
        _(
            "Slurm's words say why; often the person has no association with the namespace's "
            "account (sacctmgr add user NAME account=ACCOUNT) or the nodes are down (sinfo -R)."
        ),
    )


def _read_step(patient: Patient, transport: Transport, token: str) -> str:
    host, path = patient.node_words["host"], patient.check_file
    remedy = _(
        "The work root must be the same directory on the login node and on all compute nodes: "
        "mount it there, or choose another “work root”."
    )
    if patient.node_words.get("seen") != "yes":
        raise Fault(
            _(
                "Node %(host)s does not see %(path)s, written on the login node.",
                host=host,
                path=path,
            ),
            remedy,
        )
    if patient.node_words.get("wrote") != "yes":
        raise Fault(
            _(
                "Node %(host)s cannot write to %(directory)s.",
                host=host,
                directory=path.rpartition("/")[0],
            ),
            remedy,
        )
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while True:
        try:
            if transport.read_at(f"{path}.back", 0, 100) == token.encode():
                return _("node %(host)s reads and writes it", host=host)
        except RemoteFileError:
            pass
        if time.monotonic() > deadline:
            raise Fault(
                _("What node %(host)s wrote is not seen on the login node.", host=host), remedy
            )
        time.sleep(0.5)


def check_runtime(patient: Patient) -> str:
    runtime, host = patient.cluster.runtime, patient.node_words["host"]
    words = patient.node_words.get("runtime", "")
    if runtime == Cluster.Runtime.NONE:
        return _("none wanted: commands run on the node itself")
    if not any(letter.isdigit() for letter in words) or "not found" in words:
        raise Fault(
            _(
                "%(runtime)s does not run on node %(host)s: %(words)s",
                runtime=runtime,
                host=host,
                words=words[:200] or _("no answer"),
            ),
            _(
                "Install it on all compute nodes and in the PATH of people's logins, or correct "
                "“container runtime” of the cluster (%(names)s).",
                names=", ".join(Cluster.Runtime.values),
            ),
        )
    if runtime == Cluster.Runtime.PYXIS:
        helped = patient.service().run(patient.commands.acting("srun", "--help"))
        if "--container-image" not in helped.text:
            raise Fault(
                _("srun has no --container-image: Slurm does not load Pyxis."),
                _("Add it to plugstack.conf on the login node and on all compute nodes."),
            )
    return _("%(words)s on node %(host)s", words=words, host=host)
