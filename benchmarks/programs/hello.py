"""The smallest serving program: it prints 200 once it answers, and serves until its standard input ends."""

import sys
import urllib.request

import daskserve as serve


@serve.deployment
class Hello:
    def __call__(self, request):
        return "hello"


serve.run(Hello.bind(), http_options={"port": 8123})
print(urllib.request.urlopen("http://127.0.0.1:8123/").status, flush=True)
sys.stdin.readline()
