#!/usr/bin/env python3
"""A second implementation of verifying receipts, which checks the vectors.

It is made from proto/SPEC.md, Part II, alone, for being read beside it: the
numbers in comments are those of its sections. It needs the package
"cryptography", version 38 or later. It is no library.
"""

import base64
import binascii
import datetime
import hashlib
import json
import pathlib
import re
import sys

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

HERE = pathlib.Path(__file__).resolve().parent


class Refused(Exception):
    """Something is refused; the first argument is the class of the error."""


def need(ok, kind="malformed"):
    if not ok:
        raise Refused(kind)


def sha256(b):
    return hashlib.sha256(b).digest()


def b64(text, size=None):
    """Section II: base64 with padding and zero bits at the end."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused("malformed")
    need(base64.b64encode(raw).decode() == text and size in (None, len(raw)))
    return raw


def decimal(text, limit):
    need(isinstance(text, str) and re.fullmatch(r"0|[1-9][0-9]{0,19}", text) and int(text) < limit)
    return int(text)


def canonical(value):
    """RFC 8785 for objects, arrays and strings."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def parse(text):
    def no(_):
        raise Refused("malformed")

    try:
        return json.loads(text, parse_float=no, parse_int=no, parse_constant=no)
    except (ValueError, RecursionError):
        raise Refused("malformed")


# Section 13.


def code(limit):
    return lambda v: need(re.fullmatch("[a-z0-9._-]{1,%d}" % limit, v))


def octets(*sizes):
    return lambda v: need(re.fullmatch("([0-9a-f]{2})*", v) and len(v) // 2 in sizes)


def below(limit, least=0):
    return lambda v: need(decimal(v, limit) >= least)


def one_of(*values):
    return lambda v: need(v in values)


def instant(v):
    need(re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z", v))
    try:
        need(datetime.datetime.strptime(v, "%Y-%m-%dT%H:%M:%S.%fZ").year >= 1970)
    except ValueError:
        raise Refused("malformed")


def listed(members, order):
    def check(v):
        need(isinstance(v, list) and 1 <= len(v) <= 512)
        for item in v:
            need(isinstance(item, dict) and item.keys() == members.keys())
            for name, valid in members.items():
                need(isinstance(item[name], str))
                valid(item[name])
        keys = [order(item) for item in v]
        need(all(a < b for a, b in zip(keys, keys[1:])))

    return check


def verifier_key(v):
    need(re.fullmatch(r"[\x21-\x2a\x2c-\x7e]{1,256}\+[0-9a-f]{8}\+[A-Za-z0-9+/=]+", v))
    name, rest = v.split("+", 1)
    key_hash, key64 = rest.split("+", 1)
    key = b64(key64, 33)
    need(key[0] == 1 and sha256(name.encode() + b"\n" + key)[:4].hex() == key_hash)
    return name, bytes.fromhex(key_hash), Ed25519PublicKey.from_public_bytes(key[1:])


FIELDS = {
    "type": one_of("lethe.statement/v1"),
    "kind": lambda v: need(v in KINDS),
    "tenant": code(128),
    "handle": octets(16),
    "scope": one_of("person", "classes", "tenant"),
    "classes": listed({"name": code(64), "number": below(65536, 1)}, lambda c: int(c["number"])),
    "generation": below(2**32, 1),
    "dead_keys": listed(
        {"class_number": below(65536, 1), "generation": below(2**32, 1), "key_id": octets(16)},
        lambda k: (int(k["class_number"]), int(k["generation"]), k["key_id"]),
    ),
    "existed": one_of("yes", "no", "unknown"),
    "request": octets(16, 32),
    "pseudonym_check": octets(16, 32),
    "epoch": below(2**32),
    "of": below(2**60),
    "root": lambda v: need(re.fullmatch(r"[ -~]{1,256}", v)),
    "principal": lambda v: need(re.fullmatch(r"[ -~]{1,2048}", v)),
    "end_action": one_of("destroy", "deny"),
    "verifier_key": verifier_key,
}
FIELDS.update(dict.fromkeys(["time", "drained_by", "due", "final_by", "hold_end", "planned_end"], instant))
FIELDS.update(dict.fromkeys(["approved_by", "reason", "final_basis", "anchor", "hold", "kms"], code(64)))
FIELDS.update(
    dict.fromkeys(
        "bucket_width_s lease_ms retention_s width_from_s next_bucket_width_s next_width_from_s "
        "bucket_start_s bucket_end_s".split(),
        below(2**63),
    )
)
DECIMALS = {n for n, f in FIELDS.items() if n.endswith("_s") or n in ("lease_ms", "epoch", "generation")}

KINDS = {
    "tenant-created": ("tenant pseudonym_check", ""),
    "class-set": (
        "tenant classes bucket_width_s lease_ms retention_s",
        "approved_by end_action width_from_s next_bucket_width_s next_width_from_s",
    ),
    "destroyed": (
        "tenant scope existed reason drained_by epoch anchor",
        "handle generation classes dead_keys final_by final_basis of",
    ),
    "scheduled": ("tenant scope reason due anchor", "handle generation classes drained_by epoch"),
    "cancelled": ("tenant of", "scope handle generation classes"),
    "reinstated": ("tenant scope handle generation", "classes of"),
    "hold-placed": ("tenant scope hold reason", "handle hold_end"),
    "hold-released": ("tenant scope hold", "handle of"),
    "expired": ("tenant classes bucket_start_s bucket_end_s drained_by epoch anchor", "final_by final_basis of"),
    "epoch-opened": ("epoch root kms", "planned_end"),
    "epoch-draining": ("epoch", ""),
    "epoch-drained": ("epoch", ""),
    "epoch-retiring": ("epoch root kms due", ""),
    "epoch-cancelled": ("epoch root kms", ""),
    "epoch-closed": ("epoch root kms final_basis", ""),
    "sanitised": ("epoch", ""),
    "ledger-key": ("verifier_key", ""),
}


def statement(s, text):
    need(isinstance(s, dict) and len(text) <= 131072 and text.isascii())
    for name, value in s.items():
        need(name in FIELDS and (isinstance(value, str) or name in ("classes", "dead_keys")))
        FIELDS[name](value)
    need({"type", "kind", "time"} <= s.keys())
    must, may = (set(names.split()) for names in KINDS[s["kind"]])
    need(must <= s.keys() <= must | may | {"type", "kind", "time", "anchor", "principal", "reason", "request"})
    need(not any(s[n] == "0" for n in DECIMALS & s.keys() - must))
    need(all(s[n] >= s["time"] for n in ("drained_by", "final_by", "due") if n in s))
    kind, scope = s["kind"], s.get("scope")
    if kind in ("destroyed", "expired"):
        need(("final_by" in s) == ("final_basis" in s))
    if kind in ("class-set", "expired"):
        need(len(s["classes"]) == 1)
    if scope in ("person", "classes"):
        need("handle" in s)
        need("generation" in s or kind not in ("destroyed", "scheduled", "reinstated"))
        need(scope == "person" or "classes" in s)
    if scope == "tenant":
        need(not s.keys() & {"handle", "generation", "classes", "dead_keys"} and kind != "reinstated")
    need(s.get("existed") not in ("no", "unknown") or "dead_keys" not in s)
    if kind == "expired":
        need(int(s["bucket_start_s"]) < int(s["bucket_end_s"]))
    need(canonical(s) == text)


# Section 14.


def open_checkpoint(signed, pinned):
    need(len(signed.encode()) <= 8192)
    text, found, signatures = signed.partition("\n\n")
    need(found)
    lines = text.split("\n")
    need(len(lines) == 3)
    origin, size, root = lines[0], decimal(lines[1], 2**60), b64(lines[2], 32)
    need(re.fullmatch(r"[\x21-\x2a\x2c-\x7e]{1,256}", origin))
    need(signatures.endswith("\n"))
    seen = set()
    for line in signatures[:-1].split("\n"):
        m = re.fullmatch(r"— ([^ +]+) ([A-Za-z0-9+/=]+)", line)
        need(m)
        name = m.group(1)
        try:
            key_hash = base64.b64decode(m.group(2))[:4]
        except binascii.Error:
            raise Refused("malformed")
        key = pinned.get((name, key_hash))
        need(key and name == origin, "signature")
        raw = b64(m.group(2), 4 + 64)
        need((name, key_hash) not in seen)
        seen.add((name, key_hash))
        try:
            key.verify(raw[4:], (text + "\n").encode())
        except InvalidSignature:
            raise Refused("signature")
    return origin, size, root


def pin(keys):
    parsed = [verifier_key(k) for k in keys]
    return {(name, key_hash): key for name, key_hash, key in parsed}


# Sections 12 and 15.


def node(left, right):
    return sha256(b"\x01" + left + right)


def root_of(path, index, size, leaf):
    """RFC 6962 section 2.1.1, as a walk from the leaf: RFC 9162 section 2.1.3.2."""
    need(index < size, "proof")
    fn, sn, r = index, size - 1, leaf
    for p in path:
        need(sn != 0, "proof")
        if fn & 1 or fn == sn:
            r = node(p, r)
            while fn & 1 == 0 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            r = node(r, p)
        fn, sn = fn >> 1, sn >> 1
    need(sn == 0, "proof")
    return r


def parse_proof(text):
    m = re.fullmatch(r"c2sp\.org/tlog-proof@v1\nindex ([0-9]+)((?:\n[^\n]+)*)\n\n(.*)", text, re.DOTALL)
    need(m)
    hashes = m.group(2).split("\n")[1:]
    need(len(hashes) <= 60)
    return decimal(m.group(1), 2**60), [b64(h, 32) for h in hashes], m.group(3)


# Section 16.

ABOUT = {
    "cancelled": {"scheduled"},
    "destroyed": {"scheduled"},
    "reinstated": {"destroyed"},
    "hold-released": {"hold-placed"},
}
OF_EPOCH = {"sanitised", "epoch-retiring", "epoch-cancelled", "epoch-closed"}


def overtakes(s, scheduled):
    """A destruction of the person or the tenant reaches all that was scheduled."""
    if s["kind"] != "destroyed" or scheduled["kind"] != "scheduled" or s["tenant"] != scheduled["tenant"]:
        return False
    if s["scope"] == "tenant":
        return True
    return s["scope"] == "person" and s["handle"] == scheduled.get("handle") and int(s["generation"]) >= int(scheduled.get("generation", "0"))


def ends_epoch(s, before):
    """A later stage is that of the epoch of what it ends, and comes once."""
    said = {f["kind"] for f in before if f.get("epoch") == s["epoch"]}
    if "epoch-closed" in said or s["kind"] == "sanitised" and "sanitised" in said:
        return False
    return bool(said & {"destroyed", "expired"})


def verify(text, keys):
    pinned = pin(keys)
    need(len(text.encode()) <= 1048576)
    doc = parse(text)  # step 1
    need(isinstance(doc, dict) and doc.keys() == {"entries", "format"} and doc["format"] == "lethe.receipt/v1")
    need(isinstance(doc["entries"], list) and 1 <= len(doc["entries"]) <= 16)
    parsed = []
    for e in doc["entries"]:
        need(isinstance(e, dict) and e.keys() == {"proof", "salt", "statement"})
        need(isinstance(e["proof"], str) and isinstance(e["salt"], str))
        statement(e["statement"], canonical(e["statement"]))
        parsed.append((e["statement"], b64(e["salt"], 32), *parse_proof(e["proof"])))
    need(canonical(doc) + "\n" == text)
    found = []
    for s, salt, index, path, signed in parsed:  # step 2
        origin, size, root = open_checkpoint(signed, pinned)
        leaf = sha256(b"\x00" + sha256(salt + canonical(s).encode()))
        need(root_of(path, index, size, leaf) == root, "proof")
        found.append((s, index, origin, size, root, leaf))
    roots = {}
    for i, (s, index, origin, size, root, _) in enumerate(found):  # step 3
        need(origin == found[0][2] and roots.setdefault(size, root) == root, "mismatch")
        if i == 0:
            need(s["kind"] not in ("sanitised", "epoch-cancelled", "cancelled"), "mismatch")
            continue
        need(index > found[i - 1][1], "mismatch")
        if s["kind"] in OF_EPOCH:
            need(ends_epoch(s, [f[0] for f in found[:i]]), "mismatch")
            continue
        need(
            any(
                overtakes(s, f[0])
                or s.get("of") == str(f[1])
                and s.get("tenant") == f[0].get("tenant")
                and s.get("handle", f[0].get("handle")) == f[0].get("handle")
                and f[0]["kind"] in ABOUT.get(s["kind"], ())
                for f in found[:i]
            ),
            "mismatch",
        )
    return [
        {
            "index": index,
            "kind": s["kind"],
            "leaf_hash": base64.b64encode(leaf).decode(),
            "tree_size": size,
            "root": base64.b64encode(root).decode(),
        }
        for s, index, _, size, root, leaf in found
    ]


# Section 18.


def consistent(older, newer, proof, keys):
    pinned = pin(keys)
    origin, m, first = open_checkpoint(older, pinned)
    origin2, n, second = open_checkpoint(newer, pinned)
    need(origin == origin2 and m <= n, "mismatch")
    need(m != n or first == second, "mismatch")
    need(all(len(h) == 32 for h in proof))
    if m == 0:
        empty = sha256(b"")
        need(first == empty and not proof and (n or second == empty), "proof")
        return
    if m == n:
        need(not proof, "proof")
        return
    # RFC 9162 section 2.1.4.2.
    path = list(proof)
    if m & (m - 1) == 0:
        path.insert(0, first)
    need(path, "proof")
    fn, sn = m - 1, n - 1
    while fn & 1:
        fn, sn = fn >> 1, sn >> 1
    fr = sr = path[0]
    for c in path[1:]:
        need(sn != 0, "proof")
        if fn & 1 or fn == sn:
            fr, sr = node(c, fr), node(c, sr)
            while fn & 1 == 0 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            sr = node(sr, c)
        fn, sn = fn >> 1, sn >> 1
    need(fr == first and sr == second and sn == 0, "proof")


def outcome(fn, *args):
    try:
        return None, fn(*args)
    except Refused as r:
        return r.args[0], None


def main():
    bad = cases = 0

    def check(file, case, got):
        nonlocal bad, cases
        cases += 1
        if got != case["result"]:
            bad += 1
            print(f"{file}: {case['name']}: got {got}, want {case['result']}", file=sys.stderr)

    for case in json.loads((HERE / "statements.json").read_text()):
        kind, _ = outcome(lambda text: statement(parse(text), text), case["statement"])
        check("statements.json", case, kind or "parsed")
    for case in json.loads((HERE / "verify.json").read_text()):
        kind, entries = outcome(verify, case["receipt"], case["verifier_keys"])
        check("verify.json", case, kind or ("verified" if entries == case["entries"] else "other entries"))
    for case in json.loads((HERE / "consistency.json").read_text()):
        proof = [base64.b64decode(h) for h in case["proof"]]
        kind, _ = outcome(consistent, case["older"], case["newer"], proof, case["verifier_keys"])
        check("consistency.json", case, kind or "verified")
    print(f"{cases} cases, {bad} wrong")
    return 1 if bad or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
