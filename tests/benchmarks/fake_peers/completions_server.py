#!/usr/bin/env python3
"""A server like llama.cpp's and vllm's: healthy after a moment, streams as many words as asked for, then the usage."""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STARTED = time.monotonic()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() - STARTED > 0.2 else 503)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"][0] == 666:
            self.send_error(400, "no such token")
            return
        self.send_response(200)
        self.end_headers()
        count = body["max_tokens"]
        for i in range(count - 1):  # the last token has no text of its own
            self.say({"choices": [{"text": f" {i}"}]})
        self.say({"choices": [{"text": ""}], "usage": None})
        self.say({"choices": [], "usage": {"completion_tokens": count}})
        self.wfile.write(b"data: [DONE]\n\n")

    def say(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
