"""Official data of tau-bench and tau2-bench under domains of this project: one adapter for retail and airline.

tau2-bench's telecom builds on it (:mod:`environments.telecom.official`): there the user has tools too.

A domain brings its tools and the names of its tables; everything else is here::

    def configured(self, config, services):
        if config.data is not None:
            return official_domain("airline", config, services, TABLES, tools_of, short_prompt="...")
        ...

    folder ──► load_official ──► OfficialData(base, policy, tasks by split)
                                      │
    tools ──► OfficialDesk ───────────┴──► OfficialDomain ──► OfficialEnvironment (or a judged one)

``TABLES`` are the names of the database's files (``users`` for ``users.json`` or ``users.json.gz``) and of the keys of
tau2-bench's ``db.json``. ``tools_of(form)`` gives the tools in the order the policy sees them, for
``form`` "tau" or "tau2": the few rules in which the two benchmarks differ are the domain's to know.

Tools written for it raise :class:`environments.kit.database.ToolError` for what the benchmark refuses, and do so before
they write; they return the record, which is answered as ``json.dumps`` writes it, or a text. They need not check types:
:class:`environments._tau.desk.OfficialDesk` checks the names of the arguments alone, as the official tools do, and
turns a ``TypeError``, ``KeyError`` and the like into a refusal. :mod:`environments._tau.desk` has the three tools that
both domains share, :mod:`environments._tau.folder` says how a folder is laid out.

Options (``environment.options``):

``skip_noop: true``
    leaves out tasks that earn for doing nothing, from every split
``leave_out: NL_ASSERTION``
    drops a part of tau2-bench's ``reward_basis`` (several are separated by commas); without it, assertions go to the
    endpoint of the section ``judge``, and it is an error if there is none
``split: base``
    takes the set of that name in tau2-bench's ``split_tasks.json`` as test split (:mod:`environments._tau.folder`)
``communicate: true``
    requires tau2-bench's ``communicate_info`` of every task, also where the basis does not: a reward of our own for
    training without a judge
"""

from environments._tau.domain import OfficialDomain, official_domain
from environments._tau.folder import OfficialData, load_official

__all__ = ["OfficialData", "OfficialDomain", "load_official", "official_domain"]
