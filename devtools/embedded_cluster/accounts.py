"""Creates the users of the embedded cluster: Unix accounts, and their associations in Slurm's accounting.

All embedded clusters of the machine share the Unix accounts, which are never removed. Accounts that were not created
by this program are never changed.
"""

from __future__ import annotations

import pwd

from devtools.embedded_cluster import apptainer
from devtools.embedded_cluster.console import ClusterSetupError, run
from devtools.embedded_cluster.daemons import build_slurm_environment
from devtools.embedded_cluster.layout import (
    CLUSTER_NAME,
    SERVICE_USER,
    SHARED_DIR,
    USERS,
    Layout,
    ensure_directory,
    lock_file,
    read_state,
    write_atomically,
    write_state,
)

ACCOUNT_COMMENT = "Sluice embedded cluster"
MIN_UID = 1000
SLURM_ACCOUNT = "lab"
QOS_NAMES = "low,normal,tiny"
# Increase this when the accounts or QOS below change, so that existing clusters are updated.
ACCOUNTING_VERSION = 2

# (name, settings) of each QOS. "normal" is Slurm's default; its jobs may preempt (requeue) jobs of "low".
QOS_SETTINGS = (
    ("low", ["Priority=1", "Description=may be pushed back into the queue by normal jobs"]),
    ("normal", ["Priority=100", "Preempt=low", "PreemptMode=requeue"]),
    (
        "tiny",
        [
            "Priority=50",
            "Description=one small job at a time",
            "MaxTRESPerJob=cpu=2,gres/gpu=1",
            "MaxJobsPerUser=1",
            "MaxSubmitJobsPerUser=2",
            "MaxWall=-1",
            "Flags=DenyOnLimit",
        ],
    ),
)


def ensure_unix_accounts() -> list[str]:
    """Create missing Unix accounts; returns their names."""
    ensure_directory(SHARED_DIR, "root", 0o755)
    ensure_directory(SHARED_DIR / "home", "root", 0o755)
    created = []
    with lock_file(SHARED_DIR / "accounts.lock", "another cluster that creates the accounts"):
        for name in USERS:
            if ensure_unix_account(name):
                created.append(name)
    return created


def ensure_unix_account(name: str) -> bool:
    home = SHARED_DIR / "home" / name
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        # The password is "*" and not "!": without PAM, sshd treats "!" as a locked account and rejects its
        # certificates.
        run(
            [
                "useradd", "--comment", ACCOUNT_COMMENT, "--home-dir", str(home), "--create-home", "--user-group",
                "--shell", "/bin/bash", "--password", "*", "--key", f"UID_MIN={MIN_UID}",
                "--key", "HOME_MODE=0700", name,
            ]
        )  # fmt: skip
        account, created = pwd.getpwnam(name), True
    else:
        created = False
        if account.pw_gecos.split(",")[0] != ACCOUNT_COMMENT:
            raise ClusterSetupError(
                f"This machine has an account {name} that is not Sluice's (its comment is not “{ACCOUNT_COMMENT}”): "
                "rename or remove that account; scripts/cluster does not change it."
            )
    if account.pw_uid < MIN_UID:
        raise ClusterSetupError(
            f"The account {name} has UID {account.pw_uid}, below {MIN_UID}: remove it with userdel."
        )
    ensure_directory(home, name, 0o700)
    write_profile(name)
    return created


def write_profile(name: str) -> None:
    """Add Apptainer to PATH in .profile, because /etc/profile resets PATH in login shells."""
    profile = SHARED_DIR / "home" / name / ".profile"
    if not profile.is_symlink():
        line = f'PATH="{apptainer.PREFIX}/bin:$PATH"\n'
        text = profile.read_text(errors="replace") if profile.exists() else ""
        if line not in text:
            write_atomically(profile, text + line, user=name)


def run_sacctmgr(layout: Layout, *arguments: str, check: bool = True) -> str:
    return run(
        ["sacctmgr", *arguments], env=build_slurm_environment(layout), check=check, timeout_s=60
    ).stdout


def ensure_cluster_entry(layout: Layout) -> None:
    """Register the cluster in slurmdbd; slurmctld does not start without it."""
    if CLUSTER_NAME not in run_sacctmgr(layout, "-nP", "show", "cluster", "format=cluster").split():
        run_sacctmgr(layout, "-i", "add", "cluster", CLUSTER_NAME)


def ensure_slurm_accounts(layout: Layout) -> bool:
    """Create account, QOS and users in Slurm's accounting; returns whether something was missing.

    Call it after slurmctld has registered with slurmdbd: that creates the TRES gres/gpu, which a QOS limit names.
    """
    if read_state(layout).get("accounting") == ACCOUNTING_VERSION and accounts_match(layout):
        return False
    existing_qos = run_sacctmgr(layout, "-nP", "show", "qos", "format=name").split()
    for name, settings in QOS_SETTINGS:
        if name not in existing_qos:
            run_sacctmgr(layout, "-i", "add", "qos", name)
        run_sacctmgr(layout, "-i", "modify", "qos", name, "set", *settings)
    if (
        SLURM_ACCOUNT
        not in run_sacctmgr(layout, "-nP", "show", "account", "format=account").split()
    ):
        run_sacctmgr(
            layout, "-i", "add", "account", SLURM_ACCOUNT, f"cluster={CLUSTER_NAME}",
            "Description=the lab of the demonstration", "Organization=sluice",
        )  # fmt: skip
    # sacctmgr exits with 1 and "Nothing modified" if nothing had to change, so its exit codes are ignored;
    # `accounts_match` checks the result.
    run_sacctmgr(
        layout, "-i", "add", "user", ",".join(USERS), f"account={SLURM_ACCOUNT}", f"cluster={CLUSTER_NAME}",
        f"DefaultAccount={SLURM_ACCOUNT}", f"qos={QOS_NAMES}", "DefaultQOS=normal", check=False,
    )  # fmt: skip
    run_sacctmgr(
        layout, "-i", "modify", "user", "where", f"name={','.join(USERS)}", f"account={SLURM_ACCOUNT}",
        f"cluster={CLUSTER_NAME}", "set", f"qos={QOS_NAMES}", "DefaultQOS=normal", check=False,
    )  # fmt: skip
    run_sacctmgr(
        layout,
        "-i",
        "modify",
        "user",
        "where",
        f"name={SERVICE_USER}",
        "set",
        "AdminLevel=Operator",
        check=False,
    )
    write_state(layout, {**read_state(layout), "accounting": ACCOUNTING_VERSION})
    if not accounts_match(layout):
        raise ClusterSetupError(
            f"Slurm's accounting did not take the demo accounts: see {layout.log}/slurmdbd.log."
        )
    return True


def accounts_match(layout: Layout) -> bool:
    """Return whether Slurm's accounting has the users with the expected rights."""
    rows = run_sacctmgr(
        layout,
        "-nP",
        "show",
        "user",
        "withassoc",
        "format=user,adminlevel,cluster,account,defaultqos,qos",
        check=False,
    ).splitlines()
    actual = {}
    for row in rows:
        user, level, cluster, account, default_qos, qos = row.split("|")
        if cluster == CLUSTER_NAME and account == SLURM_ACCOUNT:
            actual[user] = (level, default_qos, ",".join(sorted(qos.split(","))))
    return all(
        actual.get(user) == ("Operator" if user == SERVICE_USER else "None", "normal", QOS_NAMES)
        for user in USERS
    )
