"""Cases of `raw_cases` about the lines of a request's head."""

from __future__ import annotations

from collections.abc import Iterator

from raw_cases import RawCase, head, refused, served, shown

CONTROLS = [bytes([byte]) for byte in (*range(9), *range(11, 13), *range(14, 32), 127)]
SEPARATORS = [bytes([byte]) for byte in b'"(),/;<=>?@[\\]{} \t']
HIGH = [b"\x80", b"\xa0", b"\xe9", b"\xff"]


def request_lines() -> Iterator[RawCase]:
    for method in (b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH", b"HEAD"):
        data = head(first=method + b" /echo HTTP/1.1")
        yield served(f"the method {shown(method)}", data, (method + b" /echo", b""))
        for other in (method.lower(), method.title()):
            yield refused(f"the method {shown(other)}", head(first=other + b" /echo HTTP/1.1"))
    for method in (b"BREW", b"PROPFIND", b"QUERY", b"M-SEARCH", b"PRI", b"GETX", b"G!#$%&'*+.^_`|~9T"):
        data = head(first=method + b" /echo HTTP/1.1")
        yield served(f"the method {shown(method)}", data, (method + b" /echo", b""))
    for byte in (*SEPARATORS, b":", b"\0", b"\x0b", b"\x7f", b"\xe9"):
        yield refused(f"a method holds {shown(byte)}", head(first=b"GE%bT /echo HTTP/1.1" % byte))
    for version in (b"0.9", b"1.2", b"1.9", b"2.0", b"3.0", b"9.9", b"0.0"):
        yield refused(f"HTTP/{shown(version)}", head(first=b"GET /echo HTTP/" + version), 505)
    for version in (
        b"", b"HTTP/", b"HTTP/1", b"HTTP/1.", b"HTTP/.1", b"HTTP/1.10", b"HTTP/01.1", b"HTTP/11", b"HTTP/1,1",
        b"HTTP/1.x", b"http/1.1", b"Http/1.1", b"HTTPS/1.1", b"HTTP /1.1", b"HTTP/ 1.1", b"HTTP/1 .1",
        b"HTTP/-1.1",
        b"HTTP\\1.1", b"RTSP/1.0", b"ICE/1.0", b"SIP/2.0", b"HTTP/1.1 ", b"HTTP/1.1\t", b"HTTP/1.1x",
        b"HTTP/1.1 x",
        b"HTTP/\xb9.\xb9", b"HTTP/1.1\0", b"HTTP/+1.1", b"HTTP/1.1/", b"HTTP/0x1.1",
    ):  # fmt: skip
        yield refused(f"the version {shown(version)}", head(first=b"GET /echo " + version))
    for line in (
        b"GET  /echo HTTP/1.1", b"GET /echo  HTTP/1.1", b"GET\t/echo HTTP/1.1", b"GET /echo\tHTTP/1.1",
        b"GET",
        b" GET /echo HTTP/1.1", b"GET /echo", b"/echo HTTP/1.1", b"GET HTTP/1.1", b"GET /echo x HTTP/1.1",
        b" ",
        b"HTTP/1.1 200 OK", b"PRI * HTTP/2.0 x", b"GET\x0b/echo HTTP/1.1", b"GET\xa0/echo HTTP/1.1",
    ):  # fmt: skip
        yield refused(f"the line {shown(line)}", head(first=line))


def targets() -> Iterator[RawCase]:
    for target in (
        b"/echo?a=1&b=%20", b"/echo?", b"/echo?a?b#c", b"/echo?\xff\xc3(", b'/echo?"<>{}|\\^`',
        b"/echo?//x:1/",
        b"/echo?%zz%0d%0a", b"/echo?a:b@c;d=e,f",
    ):  # fmt: skip
        data = head(first=b"POST %b HTTP/1.1" % target)
        yield served(f"the target {shown(target)}", data, (b"POST " + target.removesuffix(b"?"), b""))
    for target in (b"/nowhere", b"/%2e%2e/%00", b"//a/echo", b"/a//../.", b"/\xc3\xa4", b"/a;b=c"):
        data = head(first=b"POST %b HTTP/1.1" % target)
        yield served(f"the target {shown(target)}", data, (b"POST " + target, None))
    for byte in (*CONTROLS, b" "):
        yield refused(f"a target holds {shown(byte)}", head(first=b"GET /e%bcho HTTP/1.1" % byte))
    for target in (
        b"echo", b"?a", b"*", b"a:80", b"http:", b"http:/echo", b"http:///echo", b"http://", b"1http://a/",
        b"//",
        b"ftp://a/echo", b"ws://a/echo", b"file:///etc/passwd", b"urn:a", b"http:a/echo", b"http//a/echo",
        b"\\echo",
        b"https:\\\\a/echo", b".", b"../echo", b"%2fecho", b"javascript:1",
    ):  # fmt: skip
        if target != b"//":
            yield refused(f"the target {shown(target)}", head(first=b"GET %b HTTP/1.1" % target))
    for authority, host in (
        (b"a", b"b"), (b"a", b""), (b"a", b"a:8000"), (b"a:8000", b"a"), (b"a:8000", b"a:8001"),
        (b"a.b", b"a"),
        (b"a", b"a.b"), (b"a.", b"a"), (b"[::1]", b"[::2]"), (b"127.0.0.1", b"localhost"), (b"a:443", b"a"),
        (b"u@a", b"a"), (b"u:p@a", b"a"), (b"a@b", b"b"), (b"b:80@a", b"a"), (b"a,b", b"a"),
        (b"a%zz", b"a"), (b"a:b", b"a"),
        (b"a\\b", b"a"), (b"\xe4", b"a"), (b"[::1", b"a"),
    ):  # fmt: skip
        data = head(first=b"GET http://%b/echo HTTP/1.1" % authority, host=b"Host: " + host)
        yield refused(f"a URL of {shown(authority)} for the host {shown(host)}", data)
    for authority, host in (
        (b"a", b"a"), (b"A", b"a"), (b"a", b"A:80"), (b"a:80", b"a"), (b"a:", b"a"), (b"a:8000", b"a:8000"),
        (b"[::1]:80", b"[::1]"), (b"127.0.0.1", b"127.0.0.1"),
    ):  # fmt: skip
        data = head(first=b"GET http://%b/echo?b HTTP/1.1" % authority, host=b"Host: " + host)
        yield served(f"a URL of {shown(authority)} for the host {shown(host)}", data, (b"GET /echo?b", b""))
    keep = (b"Connection: keep-alive",)
    data = head(*keep, first=b"POST http://a/echo HTTP/1.0", host=b"")
    yield served("a URL without a Host in HTTP/1.0", data, (b"POST /echo", b""))
    yield refused("a URL of https at the port of http", head(first=b"GET https://a:80/echo HTTP/1.1"))
    for url, target in (
        (b"https://a:443/echo", b"/echo"), (b"HTTP://a/echo", b"/echo"), (b"http://a", b"/"),
        (b"http://a?b", b"/?b"),
    ):  # fmt: skip
        data = head(first=b"GET %b HTTP/1.1" % url)
        yield served(
            f"the target {shown(url)}", data, (b"GET " + target, b"" if target == b"/echo" else None)
        )
    yield refused("CONNECT of a host and port", head(first=b"CONNECT a:443 HTTP/1.1"), 501)
    for target in (b"/echo", b"a", b"*", b"http://a:80", b"a:", b":80", b"u@a:80", b"a:80/"):
        yield refused(f"CONNECT of {shown(target)}", head(first=b"CONNECT %b HTTP/1.1" % target))
    data = head(first=b"OPTIONS * HTTP/1.1")
    yield served("OPTIONS of the server", data, (b"OPTIONS *", None), statuses=(405,))


def hosts() -> Iterator[RawCase]:
    for value in (
        b"a,b", b"a, a", b"a b", b"u@a", b"u:p@a", b"a/b", b"a?b", b"a#b", b"a:b", b"a:80:80", b"a:-1",
        b"[::1", b"::1",
        b"[::1]x", b"\xe4", b"%zz", b"a%", b"http://a", b"a\\b", b"<a>", b'"a"', b"a\0", b"a\x0b",
        b"a\r\n b", b"a|b",
        b"a\r\nHost: a", b"a\r\nHost: b", b"a\r\nhost:", b"\r\nHost: a", b"a\r\nX: y\r\nHOST: a",
    ):  # fmt: skip
        yield refused(f"Host is {shown(value)}", head(host=b"Host: " + value))
    for value in (
        b"",
        b"a:80",
        b"a:",
        b"a.b.",
        b"[::1]",
        b"[::1]:80",
        b"%61",
        b"_a",
        b"127.0.0.1",
        b"a!$&'()*+;=",
    ):
        yield served(f"Host is {shown(value)}", head(host=b"Host: " + value), (b"POST /echo", b""))
    for line in (b"", b"Host : a", b"Host\t: a", b" Host: a", b"X-Host: a", b"Hosts: a", b"Host; a"):
        yield refused(f"the host line is {shown(line)}", head(host=line))
    first = b"POST /echo HTTP/1.0"
    keep = b"Connection: keep-alive"
    yield served("no Host in HTTP/1.0", head(keep, first=first, host=b""), (b"POST /echo", b""))
    yield refused("two Hosts in HTTP/1.0", head(keep, b"Host: b", first=first))


def header_names() -> Iterator[RawCase]:
    for byte in [*SEPARATORS, b"\0", b"\x08", b"\x0b", b"\x0c", b"\x1b", b"\x7f", *HIGH]:
        for place, line in (
            ("begins", byte + b"X-A: y"),
            ("holds", b"X-%bA: y" % byte),
            ("ends", b"X-A%b: y" % byte),
        ):
            yield refused(f"a name {place} with {shown(byte)}", head(line))
    for line in (b": y", b":", b"no colon", b"X\r\n: y", b"X-A\r: y"):
        yield refused(f"the line {shown(line)}", head(line))
    for line in (b"X!#$%&'*+-.^_`|~9: y", b"X:", b"X: a:b", b"x:y", b"1: y", b"X-A: y\r\nX-A: z", b"_: y"):
        yield served(f"the line {shown(line)}", head(line), (b"POST /echo", b""))


def header_values() -> Iterator[RawCase]:
    for byte in CONTROLS:
        yield refused(f"a value holds {shown(byte)}", head(b"X: a%bb" % byte))
    for byte in (b"\0", b"\x0b", b"\x0c", b"\x7f", b"\r", b"\n", b"\r\n "):
        yield refused(f"a value begins with {shown(byte)}", head(b"X: %ba" % byte))
    for byte in (b"\0", b"\x0b", b"\x0c", b"\x7f", b"\r", b"\n"):
        yield refused(f"a value ends with {shown(byte)}", head(b"X: a%b" % byte))
    for byte in (*HIGH, b"\t", b" ", b'"', b"\\", b"\x85"):
        yield served(
            f"a value holds {shown(byte)}, which is allowed", head(b"X: a%bb" % byte), (b"POST /echo", b"")
        )
    for fold in (b"\r\n ", b"\r\n\t", b"\n ", b"\r "):
        yield refused(f"a value is folded by {shown(fold)}", head(b"X: a%bb" % fold))


def line_ends() -> Iterator[RawCase]:
    lines = [b"POST /echo HTTP/1.1", b"Host: a", b"X: y", b""]
    places = ("the request line", "Host", "a header", "the head")
    for number, place in enumerate(places):
        for end in (b"\n", b"\r", b"\r\r\n", b"\n\r", b"\r\n\r", b"\n\n", b"\0\r\n", b"\x0b\r\n", b"\x85"):
            ends = [b"\r\n"] * 4
            ends[number] = end
            if (number == 3 and end == b"\n\r") or (number > 1 and end == b"\r\n\r"):
                continue  # the same as another case, or the next request begins with that CR
            data = b"".join(line + each for line, each in zip(lines, ends, strict=True))
            yield refused(f"{place} ends with {shown(end)}", data)
    whole = head()
    yield served("an empty line before a request", b"\r\n" + whole, (b"POST /echo", b""))
    body = head(b"Content-Length: 2") + b"hi"
    yield served("an empty line after a body", body + b"\r\n", (b"POST /echo", b"hi"))
    for before in (
        b"\r\n\r\n",
        b"\n",
        b"\r",
        b"\r\r\n",
        b" ",
        b"\t",
        b"\0",
        b"\x0b",
        b" \r\n",
        b"\xef\xbb\xbf",
        b"\r\n ",
    ):
        yield refused(f"{shown(before)} before a request", before + whole)
    for all_ends in (b"\n", b"\r"):
        yield refused(f"all lines end with {shown(all_ends)}", whole.replace(b"\r\n", all_ends))


#: The cases by family.
FAMILIES = (
    request_lines,
    targets,
    hosts,
    header_names,
    header_values,
    line_ends,
)
