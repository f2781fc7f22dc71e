"""Where the requests of a load test go, and what each of them has beside its prompt and seed."""

import base64
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from sdopt.apps.loadtest.config import LoadConfig
from sdopt.apps.traffic.generator import PATH, SendSchedule
from sdopt.errors import HIDDEN, UsageError, without_controls, without_passwords

_ENDING = PATH.removeprefix("/v1")
_SECRET = re.compile(
    r"auth|key|token|secret|cookie|passw|pwd|cred|jwt|signature", re.IGNORECASE
)
"""Names of headers and fields whose values nobody may read in a record."""
_SHOWN = 300
"""Characters of a server's words that are shown."""
_VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True)
class Target:
    """A server of images."""

    address: str
    """Of requests for images."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of each request; None leaves one out."""
    secrets: Sequence[str] = field(default=(), repr=False)
    """Values from the environment, and of the address, which are neither shown nor written."""
    decodes: bool = True
    """Whether its images are decoded, to see whether they are whole."""

    @property
    def asked_size(self) -> str:
        """The size of image that requests name; "" if they name none."""
        width, height = self.fields.get("width"), self.fields.get("height")
        pair = f"{width}x{height}" if width and height else ""
        return str(self.fields.get("size") or pair).lower()

    @property
    def asked_kind(self) -> str:
        """The kind of file that requests name; "" if they name none."""
        kind = str(self.fields.get("output_format") or "").lower()
        return "jpeg" if kind == "jpg" else kind

    def schedule(
        self,
        prompts: Sequence[str],
        seed: int,
        times_s: Sequence[float],
        timeout_s: float,
    ) -> SendSchedule:
        """Returns requests at these times, whose prompts take turns and whose seeds count upwards."""
        bodies = []
        for number in range(len(times_s)):
            prompt = prompts[number % len(prompts)]
            bodies.append(self._body(prompt, seed + number))
        return SendSchedule(
            self.address,
            times_s,
            bodies,
            timeout_s,
            dict(self.headers),
            self.decodes,
        )

    def _body(self, prompt: str, seed: int) -> dict[str, Any]:
        body = {"prompt": prompt, "seed": seed, **self.fields}
        return {name: value for name, value in body.items() if value is not None}

    def shown(self, text: str) -> str:
        """Returns a server's words, or its address, without the secrets in them."""
        # The longest first: one may begin with another.
        for secret in sorted(self.secrets, key=len, reverse=True):
            text = text.replace(secret, HIDDEN)
        return without_controls(without_passwords(text)[:_SHOWN])


def target_of(load: LoadConfig, url: str) -> Target:
    """Returns the server at an address, with what `load` says that it wants.

    Raises:
        UsageError: an environment variable is missing, or a header or field would be recorded with its secret.
    """
    secrets = _Secrets()
    headers = {}
    for name, text in (load.headers or {}).items():
        headers[name] = secrets.in_header(name, text)
    if load.key is not None:
        headers["Authorization"] = secrets.in_authorization(load.key)
    fields: dict[str, Any] = {}
    if load.model is not None:
        fields["model"] = load.model
    for name, value in (load.fields or {}).items():
        fields[name] = secrets.in_field(name, value)
    if secrets.problems:
        raise UsageError(secrets.problems)
    secrets.values += _in_address(url)
    return Target(address_of(url), headers, fields, secrets.values)


def _in_address(url: str) -> Iterator[str]:
    """Yields the secrets of an address, also as they are sent: some servers repeat them in what they say."""
    parts = urlsplit(url)
    if parts.username or parts.password:
        name, password = unquote(parts.username or ""), unquote(parts.password or "")
        yield password or name
        yield base64.b64encode(f"{name}:{password}".encode()).decode()
    for name, value in parse_qsl(parts.query):
        if HIDDEN in without_passwords(f"?{name}={value}"):
            yield value


class _Secrets:
    """Values of environment variables, and what is wrong with the names of these."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self.problems: list[str] = []

    def in_header(self, name: str, text: str) -> str:
        """Returns the text of a header with values in place of `$VARIABLE`."""
        return self._filled("load.headers", name, text)

    def in_field(self, name: str, value: Any) -> Any:
        """Returns a field of a request; in one that is named like a secret, with values in place of `$VARIABLE`."""
        if isinstance(value, dict):
            return {
                inner: self.in_field(f"{name}.{inner}", below)
                for inner, below in value.items()
            }
        if isinstance(value, str) and _SECRET.search(name):
            return self._filled("load.fields", name, value)
        return value

    def _filled(self, key: str, name: str, text: str) -> str:
        variables = _VARIABLE.findall(text)
        if not variables and _SECRET.search(name):
            self.problems.append(
                f"{key}.{name}: would be written into the record; name the environment variable that has it, "
                f"as in '{{{name.rpartition('.')[2]}: $NAME}}', in single quotes"
            )
        for variable in variables:
            if not self._value(variable):
                self.problems.append(
                    f"{key}.{name}: the environment variable {variable} is not set"
                )
        return _VARIABLE.sub(lambda match: os.environ.get(match[1], ""), text)

    def in_authorization(self, variable: str) -> str:
        """Returns the header that has the key in a variable."""
        key = self._value(variable)
        if not key:
            # Who gives the key itself must not find it in a log.
            self.problems.append(
                "load.key: is the name of an environment variable that has the key, and none has this name"
            )
        return f"Bearer {key}"

    def _value(self, variable: str) -> str:
        value = os.environ.get(variable, "")
        if value:
            self.values.append(value)
        return value


def address_of(url: str) -> str:
    """Returns where a server takes requests for images: at `url` itself, or below a version or root that it names."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if path.endswith(_ENDING):
        return url
    # Clients of OpenAI's are given the address with its version.
    versioned = re.search(r"/v\d\w*$", path)
    return urlunsplit(parts._replace(path=path + (_ENDING if versioned else PATH)))
