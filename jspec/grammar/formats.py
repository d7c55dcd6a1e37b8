"""Regular expressions of JSON schema's ``format``, over the values of strings.

``outlines-core`` has its own, which ignore JSON's quotes and the lengths of months. Characters that
JSON escapes are in none of these.
"""

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"{_OCTET}(?:\.{_OCTET}){{3}}"

# RFC 3339. The year is 0001 to 9999, and the 29th of February is in leap years alone.
_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_DAYS = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    "02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAYS}|(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
_HOUR, _SIXTY = "(?:[01][0-9]|2[0-3])", "[0-5][0-9]"
_TIME = rf"{_HOUR}:{_SIXTY}:{_SIXTY}(?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR}:{_SIXTY})"

# RFC 3339, appendix A.
_COUNT = "[0-9]{1,9}"
_CLOCK = f"(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_CALENDAR = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_DURATION = f"P(?:{_COUNT}W|{_CALENDAR}(?:T{_CLOCK})?|T{_CLOCK})"

# RFC 1123, of any number of labels.
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"

# RFC 5321, without quoted names and addresses in brackets.
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = rf"(?:{_ATOM}{{1,64}}|{_ATOM}(?:\.?{_ATOM}){{0,31}})@{_HOSTNAME}"

# RFC 4291: "::" stands for one group of zeros or more.
_GROUP = "[0-9A-Fa-f]{1,4}"
_LAST = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_IPV6 = "|".join(
    (
        f"(?:{_GROUP}:){{6}}{_LAST}",
        f"::(?:{_GROUP}:){{0,5}}{_LAST}",
        *(
            f"(?:{_GROUP}:){{{before}}}:(?:{_GROUP}:){{0,{5 - before}}}{_LAST}"
            for before in range(1, 6)
        ),
        f"(?:{_GROUP}:){{1,6}}:{_GROUP}",
        f"(?:{_GROUP}:){{1,7}}:",
        f"::{_GROUP}",
        "::",
    )
)

# RFC 3986, with something after the scheme.
_SAFE = "-A-Za-z0-9._~!$&'()*+,;="
_ESCAPED = "%[0-9A-Fa-f]{2}"
_PORT = "(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[0-9]{1,4})"
_SEGMENT = f"(?:[{_SAFE}:@]|{_ESCAPED})"
_AUTHORITY = (
    rf"(?:(?:[{_SAFE}:]|{_ESCAPED})*@)?(?:\[(?:{_IPV6})\]|(?:[{_SAFE}]|{_ESCAPED})+)(?::{_PORT})?"
)
_PATH = f"(?:/{_SEGMENT}*)*"
_AFTER = f"(?://{_AUTHORITY}{_PATH}|/?{_SEGMENT}+{_PATH})"
_TAIL = f"(?:[{_SAFE}:@/?]|{_ESCAPED})*"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]*:{_AFTER}(?:\?{_TAIL})?(?:#{_TAIL})?"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _URI,
    "uuid": "-".join(f"[0-9A-Fa-f]{{{count}}}" for count in (8, 4, 4, 4, 12)),
}
