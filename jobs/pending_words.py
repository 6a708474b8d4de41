"""The words of `clusters.slurm.reasons` once more, for the translators.

That module is pure and knows no languages; the catalogue is made from marked strings. A test holds the
two lists together.
"""

from __future__ import annotations

from django.utils.translation import gettext_noop as _

TEMPLATES = (
    _("Slurm has not looked at the job yet."),
    _("Other jobs with a higher priority come first."),
    _("The job is next in line and waits for nodes to become free."),
    _("The job waits for another job that it depends on."),
    _(
        "The job depends on another job in a way that can no longer come true. Stop it and submit it again."
    ),
    _("The job waits for its start time, or a short while after being put back into the queue."),
    _("The nodes are being prepared for the job."),
    _("The job was put back into the queue and its previous run is still being cleaned up."),
    _("The job waits for software licenses."),
    _("The job waits for its reservation to begin."),
    _("The job's reservation was deleted. Ask the cluster's administrator."),
    _("The job's reservation is not valid. Ask the cluster's administrator."),
    _("Nodes that the job needs are down, drained or reserved; it starts when they are back."),
    _("A node that the job needs is down."),
    _("No front-end node is available."),
    _("Slurm puts off its first look at new jobs; the job starts a little later."),
    _("The partition is closed for the moment; the job starts when it is opened."),
    _("The partition is switched off for the moment."),
    _(
        "The job asks for more (or fewer) nodes than its partition allows. Ask for another number of nodes."
    ),
    _(
        "The job asks for more time than its partition allows. Ask for less time or another partition."
    ),
    _("The job asks for something that its partition does not allow."),
    _(
        "No node of the partition can ever give what the job asks for. Ask for less or for other node features."
    ),
    _("No node meets the job's constraints at the moment."),
    _("The job asks for more memory per CPU or node than the partition allows."),
    _("The account may not use this partition. Ask the cluster's administrator."),
    _("The QOS may not be used in this partition. Ask the cluster's administrator."),
    _("The account is not valid (any more). Ask the cluster's administrator."),
    _("The QOS is not valid (any more). Ask the cluster's administrator."),
    _("The account has used more than the QOS allows for now."),
    _("A limit of the account or the QOS holds the job back."),
    _("As many tasks of this job array run as it allows at once."),
    _(
        "The job was put back into the queue too often and is now held. Ask the cluster's administrator."
    ),
    _("The job waits for burst buffer space."),
    _("The job's data is being copied to the burst buffer."),
    _("A burst buffer operation failed. Ask the cluster's administrator."),
    _("Not enough electrical power is available to start the job."),
    _("The electrical power is reserved for other jobs."),
    _("As many nodes are powered up as the cluster allows."),
    _("The network ports that MPI needs are in use on the nodes."),
    _("The job waits for the other clusters of the federation."),
    _("The job could not finish before its deadline."),
    _("Slurm or a node of it failed."),
    _("The job could not be launched: a bad working directory, or a fault of the node."),
    _("The job ended with an exit code that is not zero."),
    _("The job was ended by a signal."),
    _("The job reached its time limit."),
    _("The job was inactive for too long."),
    _("The job used more memory than it asked for."),
    _("The account's limit on running jobs is reached."),
    _("The account's limit on resources is reached."),
    _("The account's limit on time is reached."),
    _("The QOS's limit on running jobs is reached."),
    _("The QOS's limit on resources is reached."),
    _("The QOS's limit on time is reached."),
    _("The job is held; release it to let it start."),
    _("An administrator holds the job. Ask the cluster's administrator."),
    _(
        "The {owner}'s {what} limit for all its jobs together is reached; the job starts when others end."
    ),
    _("The {owner}'s budget of {what} time is used up. Ask the cluster's administrator."),
    _(
        "The running jobs of the {owner} already hold as much {what} time as is allowed; the job starts when some of them end."
    ),
    _("The job asks for more than the {owner}'s {what} limit {scope} allows. Ask for less."),
    _("The {owner}'s {what} limit {scope} is reached; the job starts when your other jobs end."),
    _("The job asks for less than the {owner}'s {what} minimum. Ask for more."),
    _(
        "The job could not be launched, was put back into the queue and is held. Ask the cluster's administrator."
    ),
    _(
        "Your login environment could not be read on the node; the job is held. Ask the cluster's administrator."
    ),
    _("The job was put back into the queue and is held until it is released."),
    _("Slurm gives the reason “{words}”."),
)
WORDS = (
    _("CPU"),
    _("GPU (generic resource)"),
    _("QOS"),
    _("account"),
    _("billing"),
    _("burst buffer"),
    _("energy"),
    _("license"),
    _("memory"),
    _("node"),
    _("per account"),
    _("per job"),
    _("per node"),
    _("per user"),
    _("resource"),
    _("run time"),
    _("running job"),
    _("waiting and running job"),
)
