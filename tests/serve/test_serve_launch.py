"""launch/serve.Dockerfile and serve.yaml: what can be checked without Docker or a cluster."""

import configparser
import dataclasses
import json
import re
import shlex
import urllib.parse

import pytest
import yaml
from service_cases import ROOT

from dmljax.commands import serve
from dmljax.commands.parser import Parser
from dmljax.serve.settings import Limits


def _arguments(words):
    """The flags of `dmljax serve`, which refuses unknown ones."""
    parser = Parser("serve", "")
    serve.add_arguments(parser)
    arguments, extras = parser.parse_known_args(words)
    assert not extras
    return arguments


def _instructions():
    text = (ROOT / "launch" / "serve.Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_the_container_runs_the_command_without_a_shell_and_without_root():
    instructions = _instructions()
    names = [name for name, _ in instructions]
    assert names[0] == "FROM" and names.count("ENTRYPOINT") == 1
    last = dict(instructions)
    assert json.loads(last["ENTRYPOINT"]) == ["dmljax", "serve"]
    arguments = _arguments(json.loads(last["CMD"]))
    assert arguments.host == "0.0.0.0" and arguments.token_file
    assert int(last["EXPOSE"]) == arguments.port
    assert last["USER"].isdecimal() and names.index("USER") > names.index("RUN")
    check = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    compile(check[2], "healthcheck", "exec")
    for name, rest in instructions:
        if name == "COPY":
            *sources, _ = shlex.split(rest)
            assert all((ROOT / source).exists() for source in sources)
    extras = re.search(r"EXTRAS=(\S+)", last["ARG"])[1].split(",")
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set(extras) <= set(config["options.extras_require"])
    assert "postgres" in extras  # serve.yaml runs this image with an index in PostgreSQL


def test_the_manifest_is_consistent():
    documents = list(yaml.safe_load_all((ROOT / "launch" / "serve.yaml").read_text()))
    deployment, service = documents
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    pod = template["spec"]
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    arguments = _arguments(container["args"])
    assert arguments.port == ports["http"] and arguments.token_file
    assert service["spec"]["ports"][0]["targetPort"] in ports
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause + arguments.drain_seconds
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "http"}
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (arguments.bundle, arguments.token_file):
        assert any(path.startswith(mount + "/") for mount in mounts)
    # A service on the network changes nothing unless someone asks for it.
    assert not arguments.allow_add and not arguments.allow_delete
    variables = {entry["name"]: entry for entry in container["env"]}
    assert "valueFrom" in variables["PGPASSWORD"]
    # What command lines say is read by everybody on a node.
    assert urllib.parse.urlsplit(arguments.index).password is None
    assert "$(" not in " ".join(container["args"])
    cache = variables["DMLJAX_CACHE"]["value"]
    assert cache.startswith(
        tuple(m["mountPath"] + "/" for m in container["volumeMounts"] if not m.get("readOnly"))
    )
    # In MiB: the process itself, those that decode, and all requests, with room to compile.
    needed = 300 + 64 * arguments.decoders + (arguments.max_memory_bytes >> 20)
    assert 1.5 * needed < 1024 * int(container["resources"]["limits"]["memory"].removesuffix("Gi"))


@pytest.mark.parametrize("name", ["serve.yaml", "shards.gke.yaml"])
def test_the_manifests_follow_the_schemas_of_kubernetes(name):
    """Unknown fields are errors, too. `gke.yaml` is a JobSet, which these schemas do not have."""
    schemas = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all((ROOT / "launch" / name).read_text()))
    version = schemas.latest_version()
    for document in documents:
        assert schemas.validate(document, version, strict=True)
    documents[0]["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(schemas.ValidationError, match="prots"):
        schemas.validate(documents[0], version, strict=True)


def test_the_page_on_security_lists_every_limit_with_its_flag_and_default():
    text = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| `(\w+)`: .* \| (`[\w-]+`) \| (\d+)\b.* \| .* \|$", text, re.MULTILINE)
    flags = {field: f"`--{flag.replace('_', '-')}`" for flag, (field, _) in serve._LIMITS.items()}
    limits = dataclasses.asdict(Limits())
    assert rows == [
        (field, flags[field], f"{value:g}" if value < 1e5 else str(value))
        for field, value in limits.items()
    ]
