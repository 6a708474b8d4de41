"""The access matrix: the status of every endpoint and method for every kind of person.

A cell is the status of the response, followed by `*` if the request changed a row (many pages answer 302 whether or not
the person was allowed). A row is one endpoint: method, URL with placeholders of `AccessData.ids`, and in brackets the
name of the body in `BODIES`. Jobs, template and upload belong to `owner`, a member of the namespace lab.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# Columns → people. All people of a column must get the same response; `AccessData.clients` says who they are.
API_COLUMNS = {
    "nobody": ("anonymous", "dead", "inactive"),
    "outsider": ("stranger", "other_admin", "staff"),
    **{name: (name,) for name in ("viewer", "member", "owner", "ns_admin", "superuser")},
    **{name: (name,) for name in ("read", "write")},  # API tokens of the owner
}
PAGE_COLUMNS = {
    "nobody": ("anonymous", "read", "write", "dead", "inactive"),
    **{name: (name,) for name in ("stranger", "viewer", "member", "owner", "ns_admin")},
    **{name: (name,) for name in ("other_admin", "staff", "superuser")},
}
ADMIN_COLUMNS = {
    "others": (*PAGE_COLUMNS["nobody"], *list(PAGE_COLUMNS)[1:-2]),
    # Has every permission of Django's, but is not a superuser.
    "staff": ("staff",),
    "superuser": ("superuser",),
}

API_TABLE = """
                                                          nobody    outsider  viewer    member    owner     ns_admin  superuser read      write
GET /api/v1/jobs                                          401       200       200       200       200       200       200       200       200
GET /front/authenticate                                   401       204       204       204       204       204       204       204       204
POST /api/v1/jobs [job]                                   401       400       403       201*      201*      201*      201*      403       201*
POST /api/v1/jobs/plan [job]                              401       400       200       200       200       200       200       200       200
POST /api/v1/jobs/batch/stop [live ids]                   401       200       200       200       200*      200*      200*      403       200*
POST /api/v1/jobs/batch/delete [ended ids]                401       200       200       200       200*      200*      200*      403       200*
GET /api/v1/jobs/{live}                                   401       404       200       200       200       200       200       200       200
PATCH /api/v1/jobs/{live} [description]                   401       404       403       403       200*      403       200*      403       200*
PATCH /api/v1/jobs/{live} [time limit]                    401       404       403       403       200*      200*      200*      403       200*
DELETE /api/v1/jobs/{ended}                               401       404       403       403       204*      204*      204*      403       204*
DELETE /api/v1/jobs/{live}                                401       404       403       403       409       409       409       403       409
DELETE /api/v1/jobs/{live}?stop_first=1                   401       404       403       403       202*      202*      202*      403       202*
POST /api/v1/jobs/{live}/stop                             401       404       403       403       200*      200*      200*      403       200*
POST /api/v1/jobs/{live}/release                          401       404       403       403       200*      200*      200*      403       200*
POST /api/v1/jobs/{ended}/retry                           401       404       403       403       200*      403       200*      403       200*
POST /api/v1/jobs/{ended}/clone                           401       404       403       201*      201*      201*      201*      403       201*
GET /api/v1/jobs/{live}/spec                              401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/script                            401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/events                            401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/tasks                             401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/attempts                          401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/files                             401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/files?root=output                 401       404       403       403       200       403       200       200       200
GET /api/v1/jobs/{live}/files/download?path=x             401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/files/download?path=x&root=output 401       404       403       403       200       403       200       200       200
GET /api/v1/jobs/{live}/files/tar                         401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/files/tar?root=output             401       404       403       403       200       403       200       200       200
GET /api/v1/jobs/{live}/logs                              401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/logs/worker/0                     401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/logs/worker/0/download            401       404       200       200       200       200       200       200       200
GET /api/v1/jobs/{live}/logs/worker/0/download?compress=1 401       404       200       200       200       200       200       200       200
GET /api/v1/templates                                     401       200       200       200       200       200       200       200       200
POST /api/v1/templates [template]                         401       201*      201*      201*      201*      201*      201*      403       201*
POST /api/v1/templates [from job]                         401       404       201*      201*      201*      201*      201*      403       201*
POST /api/v1/templates [shared]                           401       400       403       201*      201*      201*      201*      403       201*
POST /api/v1/templates/batch/delete [template ids]        401       200       200       200       200*      200*      200*      403       200*
GET /api/v1/templates/{template}                          401       404       200       200       200       200       200       200       200
PATCH /api/v1/templates/{template} [rename]               401       404       403       403       200*      200*      200*      403       200*
DELETE /api/v1/templates/{template}                       401       404       403       403       204*      204*      204*      403       204*
POST /api/v1/templates/{template}/copy                    401       404       201*      201*      201*      201*      201*      403       201*
POST /api/v1/templates/{template}/submit                  401       404       403       201*      201*      201*      201*      403       201*
GET /api/v1/uploads                                       401       200       200       200       200       200       200       200       200
POST /api/v1/uploads [code]                               401       201*      201*      201*      201*      201*      201*      403       201*
GET /api/v1/uploads/{upload}                              401       404       404       404       200       404       404       200       200
DELETE /api/v1/uploads/{upload}                           401       404       404       404       204*      404       404       403       204*
GET /api/v1/namespaces                                    401       200       200       200       200       200       200       200       200
GET /api/v1/clusters                                      401       200       200       200       200       200       200       200       200
GET /api/v1/capacity                                      401       200       200       200       200       200       200       200       200
GET /api/v1/specs                                         401       200       200       200       200       200       200       200       200
GET /api/v1/specs?namespace=lab                           401       404       200       200       200       200       200       200       200
GET /api/v1/frameworks                                    401       200       200       200       200       200       200       200       200
GET /api/v1/frameworks?namespace=lab                      401       404       200       200       200       200       200       200       200
GET /api/v1/me                                            401       200       200       200       200       200       200       200       200
GET /api/v1/job-file-schema                               401       200       200       200       200       200       200       200       200
GET /api/v1/tokens                                        401       200       200       200       200       200       200       200       200
POST /api/v1/tokens [token]                               401       201*      201*      201*      201*      201*      201*      403       403
DELETE /api/v1/tokens/{token_write}                       401       404       404       404       204*      404       404       403       204*
GET /api/v1/schema                                        200       200       200       200       200       200       200       200       200
GET /api/v1/docs                                          200       200       200       200       200       200       200       200       200
"""

PAGE_TABLE = """
                                         nobody    stranger  viewer    member    owner     ns_admin  other_admin staff     superuser
GET /                                    302       200       200       200       200       200       200       200       200
GET /home/live                           302       200       200       200       200       200       200       200       200
POST /namespace [choose]                 302       302       302       302       302       302       302       302       302
GET /jobs                                302       200       200       200       200       200       200       200       200
GET /jobs/rows?ids={live}                302       200       200       200       200       200       200       200       200
POST /jobs/batch [stop]                  302       302       302       302       302*      302*      302       302       302*
POST /jobs/batch [delete]                302       302       302       302       302*      302*      302       302       302*
GET /jobs/{live}                         302       404       200       200       200       200       404       404       200
GET /jobs/{live}/live                    302       404       200       200       200       200       404       404       200
POST /jobs/{live}/do/stop [form]         302       404       302       302       302*      302*      404       404       302*
POST /jobs/{ended}/do/retry [form]       302       404       302       302       302*      302       404       404       302*
POST /jobs/{ended}/do/delete [form]      302       404       302       302       302*      302*      404       404       302*
GET /submit                              302       200       200       200       200       200       200       200       200
GET /submit?template={template}          302       404       200       200       200       200       404       404       200
POST /submit/check [document]            401       200       200       200       200       200       200       200       200
GET /templates                           302       200       200       200       200       200       200       200       200
GET /templates/new                       302       200       200       200       200       200       200       200       200
POST /templates/new [edit]               302       422       422       302*      302*      302*      422       422       302*
POST /templates/check [form]             401       200       200       200       200       200       200       200       200
POST /templates/delete [template id]     302       302       302       302       302*      302*      302       302       302*
GET /templates/{template}                302       404       200       200       200       200       404       404       200
POST /templates/{template} [edit]        302       404       422       422       302*      302*      404       404       302*
GET /templates/{template}/use            302       404       200       200       200       200       404       404       200
POST /templates/{template}/use [form]    302       404       422       302*      302*      302*      404       404       302*
POST /templates/{template}/copy [form]   302       404       302*      302*      302*      302*      404       404       302*
GET /capacity                            302       200       200       200       200       200       200       200       200
GET /clusters                            302       403       403       403       403       403       403       200       200
GET /clusters/c1                         302       403       403       403       403       403       403       200       200
POST /clusters/c1/check [form]           302       403       403       403       403       403       403       302*      302*
GET /namespaces                          302       200       200       200       200       200       200       200       200
GET /new-namespace                       302       403       403       403       403       403       403       403       200
POST /new-namespace [form]               302       403       403       403       403       403       403       403       200
GET /namespaces/{lab}                    302       404       403       403       403       200       404       404       200
POST /namespaces/{lab} [form]            302       404       403       403       403       403       404       404       200
POST /namespaces/{lab}/members [member]  302       404       403       403       403       302*      404       404       302*
GET /audit                               302       403       403       403       403       200       200       200       200
GET /audit?about=settings                302       403       403       403       403       200       200       200       200
GET /login                               200       302       302       302       302       302       302       302       302
POST /login [form]                       200       302       302       302       302       302       302       302       302
PUT /login [form]                        200       302       302       302       302       302       302       302       302
POST /logout [form]                      302       302       302       302       302       302       302       302       302
GET /profile                             302       200       200       200       200       200       200       200       200
POST /profile [form]                     302       200       200       200       200       200       200       200       200
GET /profile/password                    302       200       200       200       200       200       200       200       200
POST /profile/password [form]            302       200       200       200       200       200       200       200       200
PUT /profile/password [form]             302       200       200       200       200       200       200       200       200
GET /tokens                              302       200       200       200       200       200       200       200       200
POST /tokens [new token]                 302       200*      200*      200*      200*      200*      200*      200*      200*
POST /tokens/{token_write}/revoke [form] 302       404       404       404       302*      404       404       404       404
POST /preferences [theme]                302       302*      302*      302*      302*      302*      302*      302*      302*
GET /i18n.js                             200       200       200       200       200       200       200       200       200
GET /healthz                             200       200       200       200       200       200       200       200       200
GET /readyz                              200       200       200       200       200       200       200       200       200
GET /metrics                             403       403       403       403       403       403       403       403       200
GET /admin/login/                        302       403       403       403       403       403       403       302       302
POST /admin/login/ [form]                302       403       403       403       403       403       403       302       302
"""

ADMIN_TABLE = """
                                                                others    staff     superuser
GET /admin/                                                     302       200       200
POST /admin/logout/ [form]                                      302       302       302
GET /admin/password_change/                                     302       302       302
POST /admin/password_change/ [form]                             302       302       302
GET /admin/password_change/done/                                302       200       200
GET /admin/autocomplete/?app_label=clusters&model_name=membership&field_name=user 302       200       200
GET /admin/jsi18n/                                              302       200       200
GET /admin/r/1/1/                                               302       404       404
GET /admin/accounts/                                            302       200       200
GET /admin/nothing                                              302       404       404
GET /admin/accounts/user/                                       302       200       200
POST /admin/accounts/user/ [form]                               302       200       200
GET /admin/accounts/user/add/                                   302       403       200
POST /admin/accounts/user/add/ [form]                           302       403       200
GET /admin/accounts/user/{bob}/                                 302       302       302
GET /admin/accounts/user/{bob}/change/                          302       200       200
POST /admin/accounts/user/{bob}/change/ [form]                  302       200       200
GET /admin/accounts/user/{bob}/history/                         302       200       200
GET /admin/accounts/user/{bob}/delete/                          302       200       200
POST /admin/accounts/user/{bob}/delete/ [yes]                   302       302*      302*
GET /admin/accounts/user/{bob}/password/                        302       200       200
POST /admin/accounts/user/{bob}/password/ [form]                302       200       200
GET /admin/auth/group/                                          302       200       200
POST /admin/auth/group/ [form]                                  302       200       200
GET /admin/auth/group/add/                                      302       403       200
POST /admin/auth/group/add/ [form]                              302       403       200
GET /admin/auth/group/{group}/                                  302       302       302
GET /admin/auth/group/{group}/change/                           302       200       200
POST /admin/auth/group/{group}/change/ [form]                   302       403       200
GET /admin/auth/group/{group}/history/                          302       200       200
GET /admin/auth/group/{group}/delete/                           302       403       200
POST /admin/auth/group/{group}/delete/ [yes]                    302       403       302*
GET /admin/clusters/cluster/                                    302       200       200
POST /admin/clusters/cluster/ [form]                            302       200       200
GET /admin/clusters/cluster/add/                                302       403       200
POST /admin/clusters/cluster/add/ [form]                        302       403       200
GET /admin/clusters/cluster/{cluster}/                          302       302       302
GET /admin/clusters/cluster/{cluster}/change/                   302       200       200
POST /admin/clusters/cluster/{cluster}/change/ [form]           302       403       200
GET /admin/clusters/cluster/{cluster}/history/                  302       200       200
GET /admin/clusters/cluster/{cluster}/delete/                   302       403       200
POST /admin/clusters/cluster/{cluster}/delete/ [yes]            302       403       200
GET /admin/clusters/namespace/                                  302       200       200
POST /admin/clusters/namespace/ [form]                          302       200       200
GET /admin/clusters/namespace/add/                              302       403       200
POST /admin/clusters/namespace/add/ [form]                      302       403       200
GET /admin/clusters/namespace/{lab}/                            302       302       302
GET /admin/clusters/namespace/{lab}/change/                     302       200       200
POST /admin/clusters/namespace/{lab}/change/ [form]             302       403       200
GET /admin/clusters/namespace/{lab}/history/                    302       200       200
GET /admin/clusters/namespace/{lab}/delete/                     302       403       200
POST /admin/clusters/namespace/{lab}/delete/ [yes]              302       403       200
GET /admin/clusters/membership/                                 302       200       200
POST /admin/clusters/membership/ [form]                         302       200       200
GET /admin/clusters/membership/add/                             302       200       200
POST /admin/clusters/membership/add/ [form]                     302       200       200
GET /admin/clusters/membership/{membership}/                    302       302       302
GET /admin/clusters/membership/{membership}/change/             302       200       200
POST /admin/clusters/membership/{membership}/change/ [form]     302       200       200
GET /admin/clusters/membership/{membership}/history/            302       200       200
GET /admin/clusters/membership/{membership}/delete/             302       200       200
POST /admin/clusters/membership/{membership}/delete/ [yes]      302       302*      302*
GET /admin/clusters/unixaccount/                                302       200       200
POST /admin/clusters/unixaccount/ [form]                        302       200       200
GET /admin/clusters/unixaccount/add/                            302       403       200
POST /admin/clusters/unixaccount/add/ [form]                    302       403       200
GET /admin/clusters/unixaccount/{unixaccount}/                  302       302       302
GET /admin/clusters/unixaccount/{unixaccount}/change/           302       200       200
POST /admin/clusters/unixaccount/{unixaccount}/change/ [form]   302       403       200
GET /admin/clusters/unixaccount/{unixaccount}/history/          302       200       200
GET /admin/clusters/unixaccount/{unixaccount}/delete/           302       403       200
POST /admin/clusters/unixaccount/{unixaccount}/delete/ [yes]    302       403       302*
GET /admin/clusters/resourcespec/                               302       200       200
POST /admin/clusters/resourcespec/ [form]                       302       200       200
GET /admin/clusters/resourcespec/add/                           302       200       200
POST /admin/clusters/resourcespec/add/ [form]                   302       200       200
GET /admin/clusters/resourcespec/{size}/                        302       302       302
GET /admin/clusters/resourcespec/{size}/change/                 302       200       200
POST /admin/clusters/resourcespec/{size}/change/ [form]         302       200       200
GET /admin/clusters/resourcespec/{size}/history/                302       200       200
GET /admin/clusters/resourcespec/{size}/delete/                 302       200       200
POST /admin/clusters/resourcespec/{size}/delete/ [yes]          302       302*      302*
GET /admin/clusters/capacitysnapshot/                           302       200       200
POST /admin/clusters/capacitysnapshot/ [form]                   302       200       200
GET /admin/clusters/capacitysnapshot/add/                       302       403       403
POST /admin/clusters/capacitysnapshot/add/ [form]               302       403       403
GET /admin/clusters/capacitysnapshot/{capacity}/                302       302       302
GET /admin/clusters/capacitysnapshot/{capacity}/change/         302       200       200
POST /admin/clusters/capacitysnapshot/{capacity}/change/ [form] 302       403       403
GET /admin/clusters/capacitysnapshot/{capacity}/history/        302       200       200
GET /admin/clusters/capacitysnapshot/{capacity}/delete/         302       403       403
POST /admin/clusters/capacitysnapshot/{capacity}/delete/ [yes]  302       403       403
"""

# 101: the websocket stays open. 4xxx: the code with which it is closed.
SOCKET_COLUMNS = API_COLUMNS
SOCKET_TABLE = """
                                 nobody    outsider  viewer    member    owner     ns_admin  superuser read      write
WS /ws/events                    4401      101       101       101       101       101       101       101       101
WS /ws/events?job={live}         4401      4404      101       101       101       101       101       101       101
WS /ws/jobs/{live}/logs/worker/0 4401      4404      101       101       101       101       101       101       101
WS /ws/nothing                   4401      4404      4404      4404      4404      4404      4404      4404      4404
"""


@dataclass(frozen=True)
class Row:
    method: str
    url: str
    body: str
    expected: dict[str, str]  # person → cell

    def __str__(self) -> str:
        return f"{self.method} {self.url} {self.body}"


def parse_table(text: str, columns: dict[str, tuple[str, ...]]) -> Iterator[Row]:
    header, *lines = text.strip("\n").splitlines()
    assert header.split() == list(columns)
    for line in lines:
        head, *cells = line.rsplit(None, len(columns))
        match = re.fullmatch(r"([A-Z]+) (\S+)(?: \[(.+)\])?", head.strip())
        assert match, line
        by_column = dict(zip(columns, cells, strict=True))
        people = {person: by_column[name] for name in columns for person in columns[name]}
        yield Row(match[1], match[2], match[3] or "", people)


ROWS = [
    *parse_table(API_TABLE, API_COLUMNS),
    *parse_table(PAGE_TABLE, PAGE_COLUMNS),
    *parse_table(ADMIN_TABLE, ADMIN_COLUMNS),
]
SOCKET_ROWS = list(parse_table(SOCKET_TABLE, SOCKET_COLUMNS))
