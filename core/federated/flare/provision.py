"""Start-up kits: certificates from NVFLARE's own provisioning, and local policies tightened before anyone gets them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....registry.errors import RecipeError
from ....registry.selection import read_yaml
from ...artifacts import folder_in_place, write_json

CONTROLLER = "tunery.core.federated.flare.controller.RoundsController"
EXECUTOR = "tunery.core.federated.flare.executor.ClientExecutor"
SERVER, ADMIN = "server", "admin"
RECIPE = "tunery.yaml"  # in a kit's folder "local"
PAYLOAD = "payload"  # where a message has ours
_HEART_BEAT_TIMEOUT = 120  # seconds until a silent site counts as gone; the engine's own is 600
_PERMISSIONS = {
    "submit_job": "any",
    "clone_job": "none",
    "manage_job": "any",
    "download_job": "any",
    "view": "any",
    "operate": "any",
    "shell_commands": "none",
    "byoc": "none",
    "server-predeployed-flwr": "none",
}
_Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
_BUILDERS = [
    {"path": "nvflare.lighter.impl.workspace.WorkspaceBuilder", "args": {"template_file": ["master_template.yml"]}},
    {"path": "nvflare.lighter.impl.static_file.StaticFileBuilder", "args": {"config_folder": "config"}},
    {"path": "nvflare.lighter.impl.cert.CertBuilder"},
    {"path": "nvflare.lighter.impl.signature.SignatureBuilder"},
]


class Project(BaseModel):
    """What ``project.yaml`` says.

    Attributes:
        name: of the federation.
        host: name or address under which sites reach the server.
        port: the server's.
        sites: names of the sites.
        admin: e-mail address of who may submit the job.
    """

    model_config = ConfigDict(extra="forbid")

    name: _Name
    host: _Name
    port: Annotated[int, Field(ge=1, le=65535)] = 8002
    sites: Annotated[list[_Name], Field(min_length=1)]
    admin: Annotated[str, Field(pattern=r"^[^@\s/]+@[^@\s/]+$")]


def need_flare() -> None:
    """Check that NVFLARE is installed.

    Raises:
        RecipeError: it is not.
    """
    try:
        import nvflare  # noqa: F401
    except ImportError:
        raise RecipeError("this needs NVFLARE", remedy="pip install 'tunery[federated]'") from None


def read_project(path: Path) -> Project:
    """Read ``project.yaml``.

    Raises:
        RecipeError: not there, not YAML, or a key or value that is wrong.
    """
    try:
        return Project.model_validate(read_yaml(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise RecipeError(
            f"{where or 'project'}: {first['msg']}", known=Project.model_fields, owner=str(path)
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"project {path} is not YAML: {error}") from None


def provision(project: Project, output_dir: Path) -> list[Path]:
    """Write a kit for every party into a new folder, each with its own key; return them.

    Raises:
        RecipeError: NVFLARE is not installed, or two parties have one name.
        ArtifactError: the folder is taken.
    """
    need_flare()
    names = [SERVER, ADMIN, *project.sites]
    if len(set(names)) < len(names) or project.host in project.sites:
        raise RecipeError("two parties of the project have one name", known=(*names, project.host))
    from nvflare.lighter.provision import prepare_builders, prepare_project
    from nvflare.lighter.provisioner import Provisioner

    org = {"org": "tunery"}
    described = {
        "api_version": 3,
        "name": project.name,
        "description": project.name,
        "gen_scripts": False,
        "participants": [
            {"name": project.host, "type": "server", "fed_learn_port": project.port, **org},
            *({"name": site, "type": "client", **org} for site in project.sites),
            {"name": project.admin, "type": "admin", "role": "project_admin", **org},
        ],
        "builders": _BUILDERS,
    }
    with folder_in_place(output_dir) as folder:
        with contextlib.redirect_stdout(io.StringIO()):
            made = Provisioner(str(folder / "made"), prepare_builders(described)).provision(prepare_project(described))
        source = Path(made.get_result_location())
        for name in names:
            shutil.copytree(source / {SERVER: project.host, ADMIN: project.admin}.get(name, name), folder / name)
        shutil.rmtree(folder / "made")  # the root key with it: a kit more is a new project
        tighten(folder / SERVER, [CONTROLLER])
        for site in project.sites:
            tighten(folder / site, [EXECUTOR])
    return [output_dir / name for name in names]


def tighten(kit: Path, allowed: list[str]) -> None:
    """Write a kit's local policies: which classes a job may name, and that no job may bring code; roles but the one we use go."""
    local = kit / "local"
    resources = json.loads((local / "resources.json.default").read_text(encoding="utf-8"))
    resources |= {"class_allow_list": allowed, "class_list_enforcement_mode": "enforce", "allow_log_streaming": False}
    if "components" in resources:  # error logs quote rows; they stay where they are
        resources["components"] = [item for item in resources["components"] if item["id"] != "site_log_streamer"]
    for item in resources.get("components", ()):
        if item["id"] == "job_scheduler":
            item["args"]["max_jobs"] = 1  # two would write to one folder
    for server in resources.get("servers", ()):
        server["heart_beat_timeout"] = _HEART_BEAT_TIMEOUT
    write_json(local / "resources.json", resources)
    write_json(
        local / "authorization.json", {"format_version": "1.0", "permissions": {"project_admin": dict(_PERMISSIONS)}}
    )


def own_state(kit: Path) -> None:
    """Have a server keep its jobs and snapshots in its own kit, not in a folder that every server of the machine shares."""
    path = kit / "local" / "resources.json"
    resources: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    state = kit.absolute() / "state"
    resources["snapshot_persistor"]["args"]["storage"]["args"]["root_dir"] = str(state / "snapshots")
    for component in resources["components"]:
        if component["id"] == "job_manager":
            component["args"]["uri_root"] = str(state / "jobs")
    write_json(path, resources)


def check_kit(kit: Path, file: str) -> Mapping[str, Any]:
    """Return what a kit's own start-up file says.

    Raises:
        RecipeError: this is no such kit.
    """
    path = kit / "startup" / file
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RecipeError(
            f"{kit} has no {path.relative_to(kit)}", remedy="name a kit of tunery federate provision"
        ) from None
    return dict(content)
