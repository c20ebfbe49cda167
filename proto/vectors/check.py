#!/usr/bin/env python3
"""A second implementation of opening blobs, which checks the vectors.

It is made from proto/SPEC.md, Part I, alone, for being read beside it: the
numbers in comments are those of the steps of section 8. It needs the package
"cryptography", version 38 or later. It holds a whole blob in memory, and is
no library.
"""

import hashlib
import hmac
import json
import pathlib
import sys

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

HERE = pathlib.Path(__file__).resolve().parent

MAGIC = bytes([0xC1]) + b"Lth"
FORMS = {1: "one-shot", 2: "stream"}
POLICIES = {1: "single", 2: "all", 3: "any"}
SEGMENT = 65536
STREAM_HEADER = 40
MAX_PLAINTEXT = 2**30


class Refused(Exception):
    """A blob is refused; the first argument is the class of the error."""


def u(value, size):
    return value.to_bytes(size, "big")


# Section 2.


def info(label, *parts):
    out = b""
    for part in (label, *parts):
        out += u(len(part), 4) + part
    return out


def hkdf(secret, salt, info_, size=32):
    return HKDF(algorithm=SHA256(), length=size, salt=salt, info=info_).derive(secret)


def derive(secret, label, *parts):
    return hkdf(secret, None, info(label, *parts))


def share(bucket_key, tenant, class_, bucket, key_id):
    return derive(bucket_key, b"lethe/v1/share", tenant, u(class_, 2), u(bucket, 8), key_id)


def blob_key(dek, share_, tenant, class_, bucket, key_id):
    return derive(dek + share_, b"lethe/v1/blob", tenant, u(class_, 2), u(bucket, 8), key_id)


def content_key_of_all(class_, bucket, keys):
    """keys are pairs of id and blob key, in the order of the header."""
    secrets = b"".join(secret for _, secret in keys)
    ids = [id_ for id_, _ in keys]
    return derive(secrets, b"lethe/v1/all", u(len(keys), 1), u(class_, 2), u(bucket, 8), *ids)


def wrap_key(secret):
    return derive(secret, b"lethe/v1/wrap")


def commitment(content):
    return derive(content, b"lethe/v1/commit")


def payload_key(content, form):
    return derive(content, {"one-shot": b"lethe/v1/oneshot", "stream": b"lethe/v1/stream"}[form])


def context_key(content, form):
    return derive(content, b"lethe/v1/context", u({"one-shot": 1, "stream": 2}[form], 1))


# XAES-256-GCM, c2sp.org/XAES-256-GCM.


def xaes_key(key, prefix):
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update
    k1 = int.from_bytes(block(bytes(16)), "big") << 1
    if k1 >> 128:
        k1 = (k1 & (2**128 - 1)) ^ 0x87
    k1 = u(k1, 16)
    halves = []
    for counter in (1, 2):
        message = bytes([0, counter]) + b"X" + bytes([0]) + prefix
        halves.append(block(bytes(a ^ b for a, b in zip(message, k1))))
    return halves[0] + halves[1]


def xaes_open(key, nonce, sealed, ad):
    try:
        return AESGCM(xaes_key(key, nonce[:12])).decrypt(nonce[12:], sealed, ad)
    except InvalidTag:
        raise Refused("corrupt") from None


# Section 7.


def encode_context(pairs):
    names = [name for name, _ in pairs]
    assert 1 <= len(pairs) <= 16 and len(set(names)) == len(names)
    out = u(len(pairs), 1)
    for name, value in sorted(pairs):
        assert 1 <= len(name) <= 64 and len(value) <= 1024
        out += u(len(name), 1) + name + u(len(value), 2) + value
    return out


def context_tag(content, form, nonce, pairs):
    return hmac.digest(context_key(content, form), nonce + encode_context(pairs), "sha256")


# Section 8.


class Header:
    def __init__(self, b):
        if len(b) == 0 or not MAGIC.startswith(b[:4]):  # 1
            raise Refused("not_sealed")
        if len(b) < 5:
            raise Refused("truncated")
        if b[4] != 1:  # 2
            raise Refused("unsupported_version")
        if len(b) < 6:  # 3
            raise Refused("truncated")
        form, policy = b[5] >> 4 & 7, b[5] & 15
        if form not in FORMS or policy not in POLICIES:
            raise Refused("corrupt")
        self.form, self.policy, self.bound = FORMS[form], POLICIES[policy], b[5] >= 0x80
        if len(b) < 17:  # 4
            raise Refused("truncated")
        n = b[16]
        if self.policy == "single" and n != 1 or self.policy != "single" and not 2 <= n <= 64:
            raise Refused("corrupt")
        core = 49 + 16 * n
        size = core + (72 * n if self.policy == "any" else 0)
        if len(b) < size:  # 5
            raise Refused("truncated")
        self.class_ = int.from_bytes(b[6:8], "big")
        self.bucket = int.from_bytes(b[8:16], "big")
        self.ids = [b[17 + 16 * i : 33 + 16 * i] for i in range(n)]
        for a, c in zip(self.ids, self.ids[1:]):  # 6
            if not a < c:
                raise Refused("corrupt")
        self.commitment = b[core - 32 : core]
        self.wrapped = [b[core + 72 * i : core + 72 * (i + 1)] for i in range(n)]
        self.raw = b[:size]
        self.core_hash = hashlib.sha256(b[:core]).digest()
        self.hash = hashlib.sha256(self.raw).digest()


def expected(h, e):
    """Steps 7 and 8: returns the recipient who opens."""
    if h.form != e["form"]:
        raise Refused("wrong_form")
    if (h.policy, h.class_, h.bucket) != (e["policy"], e["class"], e["bucket"]):
        raise Refused("wrong_recipient")
    held = {id_ for id_, _ in e["keys"]}
    known = [id_ for id_ in h.ids if id_ in held]
    if not known:
        raise Refused("wrong_recipient")
    if h.policy != "any":
        if held - set(h.ids):
            raise Refused("wrong_recipient")
        if len(known) < len(h.ids):
            raise Refused("missing_keys", [id_ for id_ in h.ids if id_ not in held])
    return known[0]


def content_key(h, e, by):
    """Steps 9 and 10."""
    keys = dict(e["keys"])
    if h.policy == "single":
        content = keys[by]
    elif h.policy == "all":
        content = content_key_of_all(h.class_, h.bucket, [(id_, keys[id_]) for id_ in h.ids])
    else:
        i = h.ids.index(by)
        w = h.wrapped[i]
        content = xaes_open(wrap_key(keys[by]), w[:24], w[24:], h.core_hash + u(i, 1))
    if not hmac.compare_digest(commitment(content), h.commitment):
        raise Refused("corrupt")
    return content


def check_context(h, content, nonce, tag, e):
    pairs = e["context"]
    if h.bound != bool(pairs):
        raise Refused("wrong_context")
    if h.bound and not hmac.compare_digest(context_tag(content, h.form, nonce, pairs), tag):
        raise Refused("wrong_context")


def open_blob(b, e):
    h = Header(b)
    by = expected(h, e)
    content = content_key(h, e, by)
    body = b[len(h.raw) :]
    trace = {
        "header": h.raw,
        "header_hash": h.hash,
        "content_key": content,
        "commitment": h.commitment,
        "payload_key": payload_key(content, h.form),
        "opened_by": by,
    }
    one = open_one_shot if h.form == "one-shot" else open_stream
    plain = one(h, content, body, e, trace)
    if h.bound:
        trace["context_tag"] = body[:32]
        trace["context_key"] = context_key(content, h.form)
        trace["encoded_context"] = encode_context(e["context"])
    return plain, trace


def open_one_shot(h, content, body, e, trace):
    gap = 32 if h.bound else 0
    if len(body) < gap + 40:  # 11
        raise Refused("truncated")
    if len(body) > gap + 40 + MAX_PLAINTEXT:
        raise Refused("too_large")
    tag, nonce, sealed = body[:gap], body[gap : gap + 24], body[gap + 24 :]
    key = payload_key(content, "one-shot")
    trace["nonce"], trace["gcm_key"] = nonce, xaes_key(key, nonce[:12])
    plain = xaes_open(key, nonce, sealed, h.hash)  # 12
    check_context(h, content, nonce, tag, e)  # 13
    return plain


def open_stream(h, content, body, e, trace):
    gap = 32 if h.bound else 0
    if len(body) <= gap:  # 11, 12
        raise Refused("truncated")
    if body[gap] != STREAM_HEADER:
        raise Refused("corrupt")
    if len(body) < gap + STREAM_HEADER:
        raise Refused("truncated")
    tag, stream = body[:gap], body[gap:]
    nonce = stream[1:STREAM_HEADER]
    salt, prefix = nonce[:32], nonce[32:]
    key = hkdf(payload_key(content, "stream"), salt, h.hash)
    trace["nonce"], trace["gcm_key"] = nonce, key
    aead = AESGCM(key)

    def segment(i, last, sealed):
        return aead.decrypt(prefix + u(i, 4) + u(last, 1), sealed, b"")

    plain = b""
    i, at = 0, STREAM_HEADER
    while True:  # 13
        end = (i + 1) * SEGMENT
        last = len(stream) <= end
        sealed = stream[at:end]
        if i == 2**32 - 1:
            raise Refused("too_large")
        if last and len(sealed) < 16:
            raise Refused("truncated")
        if last and i > 0 and len(sealed) == 16:
            raise Refused("corrupt")
        try:
            opened = segment(i, last, sealed)
        except InvalidTag:
            if last and len(stream) == end:
                try:
                    segment(i, False, sealed)
                except InvalidTag:
                    raise Refused("corrupt") from None
                raise Refused("truncated") from None
            raise Refused("corrupt") from None
        if i == 0:
            check_context(h, content, nonce, tag, e)
        plain += opened
        if last:
            return plain
        i, at = i + 1, end


# The vectors.


def load(name):
    return json.loads((HERE / name).read_text())


def expectation(v):
    unhex = bytes.fromhex
    return {
        **v,
        "keys": [(unhex(k["key_id"]), unhex(k["blob_key"])) for k in v["keys"]],
        "context": [(unhex(p["name"]), unhex(p["value"])) for p in v.get("context", [])],
    }


def blob_of(v, bases):
    if "file" in v:
        return (HERE / v["file"]).read_bytes()
    if "from" not in v:
        return bytes.fromhex(v["blob"])
    original = bases[v["from"]]
    b = bytearray(original)
    for edit in v.get("edits") or []:
        if "keep" in edit:
            del b[edit["keep"] :]
        elif "at" in edit:
            for i, x in enumerate(bytes.fromhex(edit["xor"])):
                b[edit["at"] + i] ^= x
        elif "append" in edit:
            b += bytes.fromhex(edit["append"])
        else:
            c = edit["copy"]
            b[c["to"] : c["to"] + c["size"]] = original[c["from"] : c["from"] + c["size"]]
    return bytes(b)


class Tally:
    def __init__(self):
        self.checks, self.failures = 0, 0

    def same(self, name, got, want):
        self.checks += 1
        if got != want:
            self.failures += 1
            print(f"FAIL {name}: got {got!r}, want {want!r}")


def check_derivation(tally):
    unhex = bytes.fromhex
    d = load("derivation.json")
    for v in d["info"]:
        parts = [unhex(p) for p in v["parts"] or []]
        tally.same("info", info(v["label"].encode(), *parts).hex(), v["info"])
    for v in d["hierarchy"]:
        of = (v["tenant"].encode(), v["class"], v["bucket"], unhex(v["key_id"]))
        s = share(unhex(v["bucket_key"]), *of)
        tally.same("share", s.hex(), v["share"])
        tally.same("blob key", blob_key(unhex(v["dek"]), s, *of).hex(), v["blob_key"])
    for v in d["all"]:
        keys = [(unhex(k["key_id"]), unhex(k["blob_key"])) for k in v["keys"]]
        tally.same("all", content_key_of_all(v["class"], v["bucket"], keys).hex(), v["content_key"])
    for v in d["wrap"]:
        tally.same("wrap", wrap_key(unhex(v["blob_key"])).hex(), v["wrap_key"])
    for v in d["content"]:
        c = unhex(v["content_key"])
        tally.same("commitment", commitment(c).hex(), v["commitment"])
        tally.same("one-shot key", payload_key(c, "one-shot").hex(), v["oneshot_key"])
        tally.same("stream key", payload_key(c, "stream").hex(), v["stream_key"])
        tally.same("context key", context_key(c, "one-shot").hex(), v["oneshot_context_key"])
        tally.same("context key", context_key(c, "stream").hex(), v["stream_context_key"])
    for v in d["context"]:
        pairs = [(unhex(p["name"]), unhex(p["value"])) for p in v["pairs"]]
        tally.same("context", encode_context(pairs).hex(), v["encoded"])


def check_blobs(tally):
    bases = {}
    for v in load("blobs.json")["blobs"]:
        b = bases[v["name"]] = blob_of(v, {})
        try:
            plain, trace = open_blob(b, expectation(v["expect"]))
        except Refused as r:
            tally.same(v["name"], r.args[0], "opened")
            continue
        tally.same(v["name"], plain, bytes(i % 251 for i in range(v["plaintext_size"])))
        for field in trace:
            tally.same(f"{v['name']}: {field}", trace[field].hex(), v.get(field))
    return bases


def check_refused(tally, bases):
    for v in load("refused.json")["refused"]:
        missing = []
        try:
            open_blob(blob_of(v, bases), expectation(v["expect"]))
            got = "opened"
        except Refused as r:
            got = r.args[0]
            if len(r.args) > 1:
                missing = [id_.hex() for id_ in r.args[1]]
        tally.same(v["name"], got, v["error"])
        tally.same(v["name"], missing, v.get("missing", []))


def main():
    tally = Tally()
    check_derivation(tally)
    bases = check_blobs(tally)
    check_refused(tally, bases)
    print(f"{tally.checks} checks, {tally.failures} failures")
    return 1 if tally.failures or tally.checks < 500 else 0


if __name__ == "__main__":
    sys.exit(main())
