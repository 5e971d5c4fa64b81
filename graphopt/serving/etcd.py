"""etcd as front and workers of several hosts share it: by its JSON gateway, which every etcd 3.4 and newer has.

Dynamo's own client lists the workers there; Python cannot reach it. So this speaks to the same addresses with the same
environment: ``ETCD_ENDPOINTS``, ``ETCD_AUTH_USERNAME`` and ``ETCD_AUTH_PASSWORD``, ``ETCD_AUTH_CA``,
``ETCD_AUTH_CLIENT_CERT`` and ``ETCD_AUTH_CLIENT_KEY``, as Dynamo's documentation names them.
Source: https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/
"""

from __future__ import annotations

import base64
import json
import ssl
import time
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_PATIENCE = 2.0  # seconds that one of the addresses has to answer
_KEEP = 7200  # seconds that etcd keeps what was put, at most
ENDPOINTS = "ETCD_ENDPOINTS"


class Etcd:
    """A few keys in etcd, each forgotten two hours after it was put at the latest.

    Args:
        environment: says where etcd is, and as whom to come.

    Raises:
        OSError: from every method, when no address answers.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        addresses = environment.get(ENDPOINTS, "http://localhost:2379").replace(" ", "").split(",")
        self._addresses = [url.rstrip("/") if "://" in url else f"http://{url}" for url in addresses]
        self._user = environment.get("ETCD_AUTH_USERNAME"), environment.get("ETCD_AUTH_PASSWORD")
        self._context: ssl.SSLContext | None = None
        if any(url.startswith("https") for url in self._addresses):
            self._context = ssl.create_default_context(cafile=environment.get("ETCD_AUTH_CA"))
            if certificate := environment.get("ETCD_AUTH_CLIENT_CERT"):
                self._context.load_cert_chain(certificate, environment.get("ETCD_AUTH_CLIENT_KEY"))
        self._token = ""
        self._lease, self._lease_end = 0, 0.0

    def load(self, key: str) -> str | None:
        """Return what a key holds."""
        pairs = self._call("kv/range", {"key": _encode(key)}).get("kvs", [])
        return base64.b64decode(pairs[0]["value"]).decode() if pairs else None

    def save(self, key: str, text: str, lease: int | None = None) -> None:
        """Let a key hold a text, as long as a lease lasts."""
        if lease is None:
            if time.monotonic() > self._lease_end:
                self._lease = self.grant(_KEEP)
                self._lease_end = time.monotonic() + _KEEP / 2
            lease = self._lease
        self._call("kv/put", {"key": _encode(key), "value": _encode(text), "lease": str(lease)})

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin with a prefix, without it."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        body = {"key": _encode(prefix), "range_end": _encode(end), "keys_only": True}
        pairs = self._call("kv/range", body).get("kvs", [])
        return [base64.b64decode(pair["key"]).decode().removeprefix(prefix) for pair in pairs]

    def grant(self, seconds: int) -> int:
        """Return a new lease that ends when it is not renewed for so long."""
        return int(self._call("lease/grant", {"TTL": seconds})["ID"])

    def renew(self, lease: int) -> bool:
        """Let a lease begin again; return whether it had not ended."""
        return bool(int(self._call("lease/keepalive", {"ID": str(lease)})["result"].get("TTL", 0)))

    def remove(self, key: str) -> None:
        """Forget a key."""
        self._call("kv/deleterange", {"key": _encode(key)})

    def revoke(self, lease: int) -> None:
        """End a lease, with all keys that were put under it."""
        self._call("lease/revoke", {"ID": str(lease)})

    def version(self) -> str:
        """Return the version of the etcd that answers."""
        return str(self._call("maintenance/status", {})["version"])

    def _call(self, path: str, body: Mapping[str, Any]) -> Any:
        if all(self._user) and not self._token:
            name, password = self._user
            self._token = self._post("auth/authenticate", {"name": name, "password": password})["token"]
        try:
            return self._post(path, body)
        except urllib.error.HTTPError as error:
            if error.code != 401 or not self._token:
                raise
        self._token = ""  # it has an end
        return self._call(path, body)

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        problem: OSError | None = None
        for address in list(self._addresses):
            headers = {"Content-Type": "application/json"} | ({"Authorization": self._token} if self._token else {})
            request = urllib.request.Request(f"{address}/v3/{path}", json.dumps(body).encode(), headers)
            try:
                with urllib.request.urlopen(request, timeout=_PATIENCE, context=self._context) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError:
                raise
            except OSError as error:
                problem = error
                # the next call begins where one answers
                self._addresses.append(self._addresses.pop(self._addresses.index(address)))
        assert problem is not None
        raise problem


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
