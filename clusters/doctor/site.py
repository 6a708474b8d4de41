"""The links behind the login node: Slurm's daemons and rights, files, a compute node and its containers."""

from __future__ import annotations

import secrets
import time

from clusters.doctor.case import Fault, Outcome, Patient
from clusters.errors import CommandTimeout, RemoteFileError, SlurmUnavailable
from clusters.models import Cluster, Namespace
from clusters.pyslurm_backend import PyslurmReader
from clusters.transport import FileToWrite, Transport

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
            f"Slurm {patient.slurm_version} is outside the releases that Sluice was made for.",
            "22.05 to 26.05 are supported. Others may work: try a job of each kind first.",
            Outcome.WARN,
        )
    return f"Slurm {patient.slurm_version}"


def check_controller(patient: Patient) -> str:
    controllers = patient.slurm().ping()
    down = [controller for controller in controllers if not controller.up]
    if len(down) == len(controllers):
        raise Fault(
            f"slurmctld at {', '.join(controller.host for controller in down)} does not answer.",
            "Start slurmctld, and look into its log file.",
        )
    if down:
        raise Fault(
            f"One of the controllers does not answer: {', '.join(one.host for one in down)}.",
            "Jobs go on with the other one; start it again.",
            Outcome.WARN,
        )
    return f"slurmctld at {', '.join(controller.host for controller in controllers)} answers"


def check_pyslurm(patient: Patient) -> str:
    capacity = PyslurmReader(patient.cluster.slurm_conf).capacity()
    return f"reads {len(capacity.nodes)} nodes and {len(capacity.partitions)} partitions"


def check_accounting(patient: Patient) -> str:
    slurm = patient.slurm()
    if not slurm.config().accounting:
        raise Fault(
            "Slurm's accounting is switched off.",
            "Sluice learns from it how jobs ended: set AccountingStorageType="
            "accounting_storage/slurmdbd in slurm.conf and run slurmdbd.",
        )
    try:
        patient.slurm_users = slurm.users()
    except SlurmUnavailable as error:
        raise Fault(
            "slurmdbd does not answer: jobs still run and are watched, but how they ended stays "
            "unknown until it is back.",
            "Start slurmdbd (and the database behind it), and look into its log file.",
        ) from error
    return f"slurmdbd answers, {len(patient.slurm_users)} users"


def check_operator(patient: Patient) -> str:
    name = patient.service().user
    known = next((user for user in patient.slurm_users if user.name == name), None)
    if known is None or not known.is_operator:
        raise Fault(
            f"{name} is no operator of Slurm: it sees nothing of what PrivateData hides, and cannot "
            "lengthen a time limit.",
            f"sacctmgr modify user {name} set AdminLevel=Operator"
            + ("" if known else f" (first: sacctmgr add user {name} account=ACCOUNT)"),
        )
    return f"{name} is {known.admin_level.lower()}"


def check_partitions(patient: Patient) -> str:
    up = {partition.name: partition.up for partition in patient.slurm().capacity().partitions}
    if not patient.namespaces:
        raise Fault(
            "No namespace uses this cluster: nobody can submit.",
            f"manage.py namespace sync {patient.cluster.name} proposes one per partition.",
        )
    problems = [
        f"{namespace.name}: {name} {'is not up' if name in up else 'is not there'}"
        for namespace in patient.namespaces
        for name in namespace.partitions
        if not up.get(name)
    ]
    if problems:
        raise Fault(
            f"{'; '.join(problems)}. The cluster has: {', '.join(up)}.",
            "Correct the partitions of the namespace, or bring the partition up: "
            "scontrol update PartitionName=NAME State=UP",
        )
    used = sorted({name for namespace in patient.namespaces for name in namespace.partitions})
    return f"{', '.join(used)} for {len(patient.namespaces)} namespaces"


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
            f"{patient.unix_user} cannot write to {root}: {error.user_message}",
            "Make the directory for each person (0700, their own), mend their quota, or correct "
            "“work root” of the cluster.",
        ) from error
    if back != token.encode():
        raise Fault(
            f"What was written to {root} did not come back.", "Look at that file system's state."
        )
    return f"{root} can be written by {patient.unix_user}"


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
            f"A step in partition {namespace.partitions[0]} did not end within {STEP_TIMEOUT_S:.0f} s.",
            "Look into the node's slurmd log; is the work root's file system hanging there?",
        ) from error
    patient.node_words = dict(
        line.split(" ", 1) for line in result.text.splitlines() if " " in line
    )
    if "host" not in patient.node_words:
        raise _step_fault(namespace, result.error_text)
    return _read_step(patient, transport, token)


def _step_fault(namespace: Namespace, words: str) -> Fault:
    last = words.splitlines()[-1] if words else "srun said nothing"
    # What srun --immediate says when its time is up (22.05 to 25.11).
    if "Requested nodes are busy" in words or "Immediate execution impossible" in words:
        return Fault(
            f"No core of partition {namespace.partitions[0]} was free within {IMMEDIATE_S} s.",
            "Run the check again when the partition is less busy.",
            Outcome.NOT_TRIED,
        )
    return Fault(
        f"srun in namespace {namespace.name}: {last}",
        "Slurm's words say why; often the person has no association with the namespace's account "
        "(sacctmgr add user NAME account=ACCOUNT) or the nodes are down (sinfo -R).",
    )


def _read_step(patient: Patient, transport: Transport, token: str) -> str:
    host, path = patient.node_words["host"], patient.check_file
    remedy = (
        "The work root must be the same directory on the login node and on all compute nodes: mount "
        "it there, or choose another “work root”."
    )
    if patient.node_words.get("seen") != "yes":
        raise Fault(f"Node {host} does not see {path}, written on the login node.", remedy)
    if patient.node_words.get("wrote") != "yes":
        raise Fault(f"Node {host} cannot write to {path.rpartition('/')[0]}.", remedy)
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while True:
        try:
            if transport.read_at(f"{path}.back", 0, 100) == token.encode():
                return f"node {host} reads and writes it"
        except RemoteFileError:
            pass
        if time.monotonic() > deadline:
            raise Fault(f"What node {host} wrote is not seen on the login node.", remedy)
        time.sleep(0.5)


def check_runtime(patient: Patient) -> str:
    runtime, host = patient.cluster.runtime, patient.node_words["host"]
    words = patient.node_words.get("runtime", "")
    if runtime == Cluster.Runtime.NONE:
        return "none wanted: commands run on the node itself"
    if not any(letter.isdigit() for letter in words) or "not found" in words:
        raise Fault(
            f"{runtime} does not run on node {host}: {words[:200] or 'no answer'}",
            f"Install it on all compute nodes and in the PATH of people's logins, or correct "
            f"“container runtime” of the cluster ({', '.join(Cluster.Runtime.values)}).",
        )
    if runtime == Cluster.Runtime.PYXIS:
        helped = patient.service().run(patient.commands.acting("srun", "--help"))
        if "--container-image" not in helped.text:
            raise Fault(
                "srun has no --container-image: Slurm does not load Pyxis.",
                "Add it to plugstack.conf on the login node and on all compute nodes.",
            )
    return f"{words} on node {host}"
