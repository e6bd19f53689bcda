"""A module of LMCache's daemon by which a test asks for the status of the others."""

import json

from lmcache.v1.multiprocess.ext_server_module import server_module_handler


def build_server_modules(build):
    class Status:
        context = build.server_context

        def report_status(self):
            return {}

        def close(self):
            pass

        @server_module_handler("tests.status")
        def status(self, _payload: bytes) -> bytes:
            found = {}
            for module in build.modules:
                found.update(module.report_status())
            return json.dumps(found, default=str).encode()

    return Status()
