"""The server's settings: what is refused, and when strangers could get in."""

from __future__ import annotations

import pytest

from kvstrata.errors import ConfigError
from kvstrata.server.settings import ServerConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("host", ""),
        ("port", 70000),
        ("port", "8000"),
        ("max_n", 0),
        ("max_queue", -1),
        ("max_body", "many"),
        ("body_timeout", 0),
        ("drain_timeout", float("nan")),
        ("drain_timeout", float("inf")),
        ("log_format", "xml"),
        ("max_prompt_tokens", 0),
        ("max_requests_per_key", 0),
        ("min_priority", 1.5),
        ("tls_cert", "/no/such/file"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=rf"^{field} is"):
        ServerConfig(**{field: value})


def test_tls_needs_both_of_its_files(tmp_path):
    file = tmp_path / "cert.pem"
    file.touch()
    with pytest.raises(ConfigError, match="both or neither"):
        ServerConfig(tls_cert=str(file))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "192.168.1.2", "example.org")),
    ],
)
def test_only_loopback_is_open_without_keys(host, loopback):
    config = ServerConfig(host=host)
    assert config.loopback is loopback
    if loopback:
        config.check_exposure(has_keys=False)
    else:
        with pytest.raises(ConfigError, match="--insecure"):
            config.check_exposure(has_keys=False)
        ServerConfig(host=host, insecure=True).check_exposure(has_keys=False)
    config.check_exposure(has_keys=True)
