"""The container, the manifest and nginx of `launch`, without Docker or a cluster."""

import configparser
import json
import re
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


def test_the_container_runs_the_command_without_a_shell_and_without_root():
    text = (ROOT / "launch" / "serve.Dockerfile").read_text()
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    last = dict(line.split(None, 1) for line in text.splitlines() if line.strip())
    assert json.loads(last["ENTRYPOINT"]) == ["dmljax", "serve"] and last["USER"].isdecimal()
    arguments = _arguments(json.loads(last["CMD"]))
    assert arguments.host == "0.0.0.0" and arguments.token_file
    assert int(last["EXPOSE"]) == arguments.port
    extras = re.search(r"EXTRAS=(\S+)", last["ARG"])[1].split(",")
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "postgres" in extras and set(extras) <= set(config["options.extras_require"])


def test_the_manifest_is_consistent():
    deployment, address = yaml.safe_load_all((ROOT / "launch" / "serve.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
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
    # A service on the network changes nothing, and its command line has no password.
    assert not arguments.allow_add and not arguments.allow_delete
    assert urllib.parse.urlsplit(arguments.index).password is None
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
