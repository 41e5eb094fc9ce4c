"""The bare local cluster and a Tornado hello: the minimum before anything can be served."""

import sys
import threading
import urllib.request

from tornado.httpserver import HTTPServer
from tornado.httputil import HTTPHeaders, ResponseStartLine

from daskserve.cluster.dask.launch import start_local_cluster
from daskserve.common import settings

cluster, client = start_local_cluster(settings.local_cluster_size(), has_dashboard=True)
ready = threading.Event()


def hello(request):
    headers = HTTPHeaders({"Content-Length": "5"})
    request.connection.write_headers(ResponseStartLine("HTTP/1.1", 200, "OK"), headers, b"hello")
    request.connection.finish()


def listen():
    HTTPServer(hello).listen(8123, "127.0.0.1")
    ready.set()


client.loop.add_callback(listen)
ready.wait()
print(urllib.request.urlopen("http://127.0.0.1:8123/").status, flush=True)
sys.stdin.readline()
client.close()
cluster.close()
