"""The container, the manifest and nginx of `launch`, without Docker or a cluster."""

import configparser
import json
import re
import shlex
import urllib.parse

import pytest
import yaml
from service_cases import ROOT

from dmljax.commands import serve
from dmljax.commands.parser import Parser
from dmljax.serve import decoding, service
from dmljax.serve.settings import Limits, is_loopback

NGINX = (ROOT / "launch" / "serve.nginx.conf").read_text()


def _arguments(words):
    """Parses flags of `dmljax serve`, which refuses unknown ones."""
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


def _volumes_of(pod, container):
    """Returns the paths that a container mounts, and the writable ones."""
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    mounts = {x["mountPath"]: x.get("readOnly", False) for x in container["volumeMounts"]}
    return list(mounts), [path for path, is_read_only in mounts.items() if not is_read_only]


def test_the_manifest_is_consistent():
    documents = list(yaml.safe_load_all((ROOT / "launch" / "serve.yaml").read_text()))
    deployment, address = documents
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    assert (address["apiVersion"], address["kind"]) == ("v1", "Service")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert address["spec"]["selector"].items() <= labels.items()
    pod = template["spec"]
    container, nginx = pod["containers"]
    arguments = _arguments(container["args"])
    # Only nginx reaches the service, and others reach nginx.
    assert is_loopback(arguments.host) and arguments.token_file
    assert f"server 127.0.0.1:{arguments.port};" in NGINX
    (port,) = nginx["ports"]
    assert f"listen {port['containerPort']};" in NGINX
    assert address["spec"]["ports"][0]["targetPort"] == port["name"]
    paths = {"startupProbe": "/readyz", "readinessProbe": "/readyz", "livenessProbe": "/healthz"}
    for probe, path in paths.items():
        assert container[probe]["httpGet"] == {"path": path, "port": port["containerPort"]}
    pauses = {int(x["lifecycle"]["preStop"]["exec"]["command"][1]) for x in pod["containers"]}
    end = arguments.max_seconds + service._CLOSE_SECONDS + 1
    assert pod["terminationGracePeriodSeconds"] > max(pauses) + end
    mounts, writable = _volumes_of(pod, container)
    for path in (arguments.bundle, arguments.token_file):
        assert path.startswith(tuple(f"{mount}/" for mount in mounts))
    mounts, _ = _volumes_of(pod, nginx)
    _, prefix, _, configuration = nginx["command"][1:]
    assert prefix in mounts and configuration == "/etc/dmljax/serve.nginx.conf"
    # A service on the network changes nothing unless someone asks for it.
    assert not arguments.allow_add and not arguments.allow_delete
    variables = {entry["name"]: entry for entry in container["env"]}
    assert "valueFrom" in variables["PGPASSWORD"]
    # What command lines say is read by everybody on a node.
    assert urllib.parse.urlsplit(arguments.index).password is None
    assert "$(" not in " ".join(container["args"])
    assert variables["DMLJAX_CACHE"]["value"].startswith(tuple(f"{x}/" for x in writable))
    # In MiB: the service itself and its workers, with room for requests.
    worker = decoding._BYTES_PER_PIXEL * arguments.max_pixels + decoding._SPARE_BYTES >> 20
    needed = 300 + arguments.decoders * worker
    assert 1.5 * needed < 1024 * int(container["resources"]["limits"]["memory"].removesuffix("Gi"))


def test_nginx_has_the_limits_of_the_service():
    values = dict(re.findall(r"^\s*(\w+) ([^;]+);", NGINX, re.MULTILINE))
    assert int(values["client_max_body_size"].removesuffix("m")) << 20 == Limits().body_bytes
    assert float(values["proxy_read_timeout"].removesuffix("s")) > Limits().seconds
    address = re.search(r"limit_conn address (\d+);", NGINX)[1]
    assert int(address) < Limits().requests


def test_the_manifests_follow_the_schemas_of_kubernetes():
    """Unknown fields are errors, too. `gke.yaml` is a JobSet, which these schemas do not have."""
    schemas = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all((ROOT / "launch" / "serve.yaml").read_text()))
    version = schemas.latest_version()
    for document in documents:
        assert schemas.validate(document, version, strict=True)
    documents[0]["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(schemas.ValidationError, match="prots"):
        schemas.validate(documents[0], version, strict=True)
