"""Serves Sterna with Ray Serve: one server a replica, one replica a node, behind Ray's router.

    cd deploy && serve run --working-dir . ray_serve:build program=/usr/bin/sterna replicas=3 \
        flags="--model /models/bonsai.gguf"

Ray's proxy then answers on port 8000 of each node, with Sterna's API. Needs `ray[serve]` on every
node, and the program and the model at the same paths. Each replica uses all cores of its node. For
several replicas on a node, set `replicas_per_node` and share the cores with `--threads` in `flags`.
"""

import asyncio
import re
import shlex
import signal
import subprocess
from contextlib import suppress

import aiohttp
from pydantic import BaseModel
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse

# Headers that belong to one connection and are not forwarded (RFC 9110, section 7.6.1).
OF_CONNECTION = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
# Ray's proxy writes its own.
OF_PROXY = {"date", "x-request-id"}
UNREACHABLE = {
    "error": {
        "message": "The server of this replica does not answer. Ray replaces it; retry.",
        "type": "server_error",
        "param": None,
        "code": "replica_unreachable",
    }
}
DRAIN_SECONDS = 60


class Settings(BaseModel):
    """The arguments of `serve run`."""

    program: str = "sterna"
    flags: str = ""
    replicas: int = 1
    replicas_per_node: int = 1
    max_requests: int = 2000


@serve.deployment(graceful_shutdown_timeout_s=DRAIN_SECONDS + 10, health_check_period_s=5)
class Sterna:
    """A server as a child process. Requests go to it as they came, and answers stream back."""

    def __init__(self, settings: Settings):
        flags = shlex.split(settings.flags)
        command = [settings.program, "--port", "0", "--drain-seconds", str(DRAIN_SECONDS), *flags]
        # The server writes its address when it is ready.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        greeting = (re.search(r"http://\S+", line) for line in self.process.stdout)
        address = next((found for found in greeting if found), None)
        if address is None:
            raise RuntimeError(f"{settings.program} exited with {self.process.wait()}")
        self.url = address.group()
        self.session = None

    async def __call__(self, request: Request):
        if self.session is None:
            no_limit = aiohttp.ClientTimeout(total=None)
            connector = aiohttp.TCPConnector(limit=0)
            self.session = aiohttp.ClientSession(
                connector=connector, timeout=no_limit, auto_decompress=False
            )
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        try:
            answer = await self.session.request(
                request.method,
                self.url + path,
                headers=forwarded(request.headers, OF_CONNECTION),
                data=await request.body(),
                allow_redirects=False,
            )
        except aiohttp.ClientConnectionError:
            return JSONResponse(UNREACHABLE, status_code=502, headers={"retry-after": "1"})
        return StreamingResponse(
            parts(answer),
            status_code=answer.status,
            headers=forwarded(answer.headers, OF_CONNECTION | OF_PROXY),
        )

    async def check_health(self):
        """Raises an error if the server has ended or stalls. Ray then replaces the replica."""
        async with aiohttp.ClientSession() as session:
            async with session.get(self.url + "/health") as answer:
                answer.raise_for_status()

    async def __del__(self):
        """Lets the running requests finish."""
        self.process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, DRAIN_SECONDS)
        self.process.kill()


def forwarded(headers, dropped):
    return {name: value for name, value in headers.items() if name.lower() not in dropped}


async def parts(answer):
    """Yields an answer as it comes. If the client leaves, the request of the server ends too."""
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()


def build(settings: Settings):
    options = Sterna.options(
        num_replicas=settings.replicas,
        max_replicas_per_node=settings.replicas_per_node,
        max_ongoing_requests=settings.max_requests,
    )
    return options.bind(settings)
