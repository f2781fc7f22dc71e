"""Where the requests of a load test go, and what each of them has beside its prompt and seed."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from sdopt.errors import HIDDEN, UsageError
from sdopt.loadtest.config import LoadConfig
from sdopt.traffic.generator import PATH, Schedule

_ENDING = PATH.removeprefix("/v1")
_SECRET = re.compile(r"auth|key|token|secret|cookie|passw", re.IGNORECASE)
"""Names of headers whose values nobody may read in a record."""
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
    """Values from the environment, which are neither shown nor written."""

    def schedule(self, prompts: Sequence[str], seed: int, times_s: Sequence[float], timeout_s: float) -> Schedule:
        """Returns requests at these times, whose prompts take turns and whose seeds count upwards."""
        bodies = []
        for number in range(len(times_s)):
            body = {"prompt": prompts[number % len(prompts)], "seed": seed + number, **self.fields}
            bodies.append({name: value for name, value in body.items() if value is not None})
        return Schedule(self.address, times_s, bodies, timeout_s, dict(self.headers))

    def shown(self, text: str) -> str:
        """Returns a server's words without the secrets that it may repeat."""
        for secret in self.secrets:
            text = text.replace(secret, HIDDEN)
        return text


def target_of(load: LoadConfig, url: str) -> Target:
    """Returns the server at an address, with what `load` says that it wants.

    Raises:
        UsageError: an environment variable is missing, or a header would be recorded with its secret.
    """
    headers, secrets, problems = dict(load.headers or {}), [], []
    for name, text in headers.items():
        variables = _VARIABLE.findall(text)
        if _SECRET.search(name) and not variables:
            problems.append(
                f"load.headers.{name}: would be written into the record; name the environment variable that has it, "
                f"as in 'load.headers={{{name}: $NAME}}', in single quotes"
            )
        missing = [variable for variable in variables if not os.environ.get(variable)]
        problems += [f"load.headers.{name}: the environment variable {variable} is not set" for variable in missing]
        secrets += [os.environ.get(variable, "") for variable in variables]
        headers[name] = _VARIABLE.sub(lambda found: os.environ.get(found[1], ""), text)
    if load.key is not None:
        key = os.environ.get(load.key)
        if not key:
            # Who gives the key itself must not find it in a log.
            problems.append("load.key: is the name of an environment variable that has the key, and none has this name")
        secrets.append(key or "")
        headers["Authorization"] = f"Bearer {key}"
    if problems:
        raise UsageError(problems)
    model = {} if load.model is None else {"model": load.model}
    return Target(address_of(url), headers, {**model, **(load.fields or {})}, [each for each in secrets if each])


def address_of(url: str) -> str:
    """Returns where a server takes requests for images: at `url` itself, or below a version or root that it names."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    if path.endswith(_ENDING):
        return url
    # Clients of OpenAI's are given the address with its version.
    versioned = re.search(r"/v\d\w*$", path)
    return urlunsplit(parts._replace(path=path + (_ENDING if versioned else PATH)))
