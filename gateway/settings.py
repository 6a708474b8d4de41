"""Django settings, read from environment variables.

`SLUICE_HOME` (default: `var/` in the project) is the directory of all files that Sluice writes: the SQLite database,
the demo's secret key, the key of the SSH certificate authority, uploads. Outside the demo (`SLUICE_DEMO=1`) and the
tests, Sluice does not start if the secret key is missing or well known.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from pathlib import Path
from zoneinfo import available_timezones

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _

from gateway.database import build_database_settings, restrict_database_permissions
from gateway.environment import env_choice, env_flag, env_int, env_list

BASE_DIR = Path(__file__).resolve().parent.parent

SLUICE_HOME = Path(os.environ.get("SLUICE_HOME") or BASE_DIR / "var")
# Also true under mypy, because its Django plugin imports the settings.
TESTING = not sys.modules.keys().isdisjoint({"pytest", "mypy"})
DEMO = env_flag("SLUICE_DEMO", default=TESTING)
DEBUG = env_flag("SLUICE_DEBUG")


def load_secret_key() -> str:
    """The value of SLUICE_SECRET_KEY. Only the demo creates a key itself, in a file with mode 0600."""
    secret_key = os.environ.get("SLUICE_SECRET_KEY", "")
    if secret_key:
        # `django-admin startproject` generates keys with this prefix, which are often published with the project.
        if len(secret_key) < 32 or secret_key.startswith("django-insecure"):
            raise ImproperlyConfigured(
                "SLUICE_SECRET_KEY is too short or well known. Give it at least 32 random "
                "characters, for example from: openssl rand -base64 48"
            )
        return secret_key
    if TESTING:
        return secrets.token_urlsafe(48)
    if not DEMO:
        raise ImproperlyConfigured(
            "SLUICE_SECRET_KEY is not set. Set it to at least 32 random characters "
            "(openssl rand -base64 48), the same for every web and engine process; "
            "or set SLUICE_DEMO=1 to try Sluice on one machine."
        )
    return load_demo_secret("secret_key")


def load_demo_secret(name: str) -> str:
    """Return the content of the file SLUICE_HOME/name; the first call creates it with random content and mode 0600."""
    path = SLUICE_HOME / name
    try:
        if not path.exists():
            SLUICE_HOME.mkdir(parents=True, exist_ok=True, mode=0o700)
            with contextlib.suppress(FileExistsError):  # another process of the demo created it
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "w") as file:
                    file.write(secrets.token_urlsafe(48))
        return path.read_text()
    except OSError as error:
        raise ImproperlyConfigured(
            f"SLUICE_HOME cannot be used: {path}: {error.strerror}."
        ) from error


SECRET_KEY = load_secret_key()
ALLOWED_HOSTS = env_list("SLUICE_ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
CSRF_FAILURE_VIEW = "gateway.error_pages.csrf_failure"
CSRF_TRUSTED_ORIGINS = env_list("SLUICE_TRUSTED_ORIGINS")

INSTALLED_APPS = [
    # Sluice's apps precede django.contrib.auth, so that the command changepassword of `accounts` replaces Django's.
    "core",
    "accounts",
    "clusters",
    "jobs",
    "engine",
    "gateway",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "whitenoise.runserver_nostatic",
    "django.contrib.staticfiles",
    "channels",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "whitenoise.middleware.WhiteNoiseMiddleware",
    "core.web.headers.response_headers",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "gateway.error_pages.cancelled_requests",
]

ROOT_URLCONF = "gateway.urls"
ASGI_APPLICATION = "gateway.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.template.context_processors.i18n",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "jobs.web.layout.layout_context",
            ],
        },
    },
]

# --- database -------------------------------------------------------------------------------

DATABASES = {"default": build_database_settings(SLUICE_HOME)}
if DATABASES["default"]["ENGINE"] == "core.sqlite" and not TESTING:
    restrict_database_permissions(Path(DATABASES["default"]["NAME"]))

AUTH_USER_MODEL = "accounts.User"
PASSWORD_HASHERS = ["accounts.hashers.WorkerPBKDF2PasswordHasher"]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {"NAME": "django.contrib.auth.password_validation.MinimumLengthValidator"},
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "home"
LOGOUT_REDIRECT_URL = "login"

# --- languages ------------------------------------------------------------------------------

LANGUAGE_CODE = "en"
LANGUAGES = [("en", _("English")), ("zh-hans", _("Simplified Chinese"))]
LOCALE_PATHS = [BASE_DIR / "locale"]
TIME_ZONE = os.environ.get("SLUICE_TIME_ZONE", "UTC")
if TIME_ZONE not in available_timezones():
    raise ImproperlyConfigured(f"SLUICE_TIME_ZONE is not a known time zone: {TIME_ZONE!r}.")
USE_TZ = True

# --- static files ---------------------------------------------------------------------------

STATIC_URL = "static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
# For development static files are served from the source tree. Otherwise `manage.py collectstatic` compresses them and
# adds a hash of the content to their names, so that browsers may cache them without a time limit.
SERVE_FROM_SOURCE = DEBUG or env_flag("SLUICE_STATIC_FROM_SOURCE", default=DEMO)
STATIC_ROOT = (
    None
    if SERVE_FROM_SOURCE
    else Path(os.environ.get("SLUICE_STATIC_ROOT") or SLUICE_HOME / "static")
)
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {
        "BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"
        if SERVE_FROM_SOURCE
        else "whitenoise.storage.CompressedManifestStaticFilesStorage"
    },
}
WHITENOISE_USE_FINDERS = SERVE_FROM_SOURCE

# --- security headers -----------------------------------------------------------------------

BEHIND_TLS = env_flag("SLUICE_BEHIND_TLS")
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = BEHIND_TLS
SESSION_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
X_FRAME_OPTIONS = "DENY"
if BEHIND_TLS:
    SECURE_PROXY_SSL_HEADER = ("HTTP_X_FORWARDED_PROTO", "https")
    SECURE_HSTS_SECONDS = env_int("SLUICE_HSTS_SECONDS", 31_536_000)
    SECURE_HSTS_INCLUDE_SUBDOMAINS = True
    SECURE_SSL_REDIRECT = True
    # Load balancers send health checks over plain HTTP.
    SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^readyz$"]
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        # xterm.js and Tabler need 'unsafe-inline': they set styles of elements by script.
        "style-src 'self' 'unsafe-inline'",
        "script-src 'self'",
        "worker-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)

# Cache-Control of the responses that may be stored, by the name of their URL pattern. All other responses are
# `private, no-store` (`core.web.headers`), except static files, whose policy WhiteNoise sets.
CACHEABLE_VIEWS = {
    # The texts of the scripts, the same for everyone with the same language. The browser asks with If-None-Match.
    "i18n": "private, no-cache",
}

# --- API ------------------------------------------------------------------------------------

API_MAX_BODY_BYTES = env_int("SLUICE_API_MAX_BODY_BYTES", 2 * 1024 * 1024, minimum=1)
# Requests of a person per minute, counted across the web processes. All requests of a minute may come at once.
API_READS_PER_MINUTE = env_int("SLUICE_API_READS_PER_MINUTE", 3000, minimum=1)
API_WRITES_PER_MINUTE = env_int("SLUICE_API_WRITES_PER_MINUTE", 600, minimum=1)
# Requests of a person in progress at once, across the web processes: planning (plan, submit, check, save a template),
# uploads, and requests that wait for a cluster (files, logs).
PLANS_PER_PERSON = env_int("SLUICE_PLANS_PER_PERSON", 4, minimum=1)
UPLOADS_PER_PERSON = env_int("SLUICE_UPLOADS_PER_PERSON", 2, minimum=1)
CLUSTER_REQUESTS_PER_PERSON = env_int("SLUICE_CLUSTER_REQUESTS_PER_PERSON", 6, minimum=1)
# Requests of one web process in progress for one Unix user of a cluster, of all people; and how many of them may
# have waited for more than a second. Its logins may be slow.
CLUSTER_REQUESTS_PER_UNIX_USER = env_int("SLUICE_CLUSTER_REQUESTS_PER_UNIX_USER", 12, minimum=1)
SLOW_REQUESTS_PER_UNIX_USER = env_int("SLUICE_SLOW_REQUESTS_PER_UNIX_USER", 4, minimum=1)
API_TOKEN_MAX_DAYS = env_int("SLUICE_API_TOKEN_MAX_DAYS", 366, minimum=1)
# The lifetime of a token if the request contains none. Limited here, because page and API do not check it again.
API_TOKEN_DEFAULT_DAYS = min(
    env_int("SLUICE_API_TOKEN_DEFAULT_DAYS", 90, minimum=1), API_TOKEN_MAX_DAYS
)
UPLOAD_DIR = Path(os.environ.get("SLUICE_UPLOAD_DIR") or SLUICE_HOME / "uploads")
UPLOAD_MAX_BYTES = env_int("SLUICE_UPLOAD_MAX_BYTES", 1024**3)
UPLOAD_MAX_UNPACKED_BYTES = env_int("SLUICE_UPLOAD_MAX_UNPACKED_BYTES", 8 * 1024**3)
UPLOAD_MAX_FILES = env_int("SLUICE_UPLOAD_MAX_FILES", 50_000)
UPLOAD_MAX_BYTES_PER_PERSON = env_int("SLUICE_UPLOAD_MAX_BYTES_PER_PERSON", 20 * 1024**3)

REST_FRAMEWORK = {
    "DEFAULT_SCHEMA_CLASS": "drf_spectacular.openapi.AutoSchema",
    "DEFAULT_AUTHENTICATION_CLASSES": [
        "accounts.tokens.TokenAuthentication",
        "accounts.tokens.HeaderCsrfSessionAuthentication",
    ],
    "DEFAULT_PERMISSION_CLASSES": ["accounts.tokens.TokenScopePermission"],
    "DEFAULT_THROTTLE_CLASSES": ["core.api.throttle.UserRateThrottle"],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["core.api.parsers.JsonParser"],
    "DEFAULT_CONTENT_NEGOTIATION_CLASS": "core.api.parsers.JsonContentNegotiation",
    "EXCEPTION_HANDLER": "gateway.problems.exception_handler",
    # Disables DRF's use of `?format=`: Sluice's own parameter of that name selects JSON or YAML for a job file.
    "URL_FORMAT_OVERRIDE": None,
    "UNAUTHENTICATED_USER": "django.contrib.auth.models.AnonymousUser",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Sluice",
    "DESCRIPTION": "Jobs on Slurm clusters: submit, watch, stop, read. Everything that the pages can do.",
    "VERSION": "1",
    "OAS_VERSION": "3.1.0",
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "SERVE_INCLUDE_SCHEMA": False,
    "COMPONENT_SPLIT_REQUEST": True,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "POSTPROCESSING_HOOKS": ["core.api.schema.add_common_responses"],
    "AUTHENTICATION_WHITELIST": [],
}

# --- web process ----------------------------------------------------------------------------

# Requests that run at the same time, and requests that wait for a cluster (files, logs) at the same time. Each has
# a thread with its own database connection. More running threads would not be faster, because they compete for the
# interpreter lock.
WEB_THREADS = env_int("SLUICE_WEB_THREADS", 4, minimum=1)
WEB_REMOTE_IO_THREADS = env_int("SLUICE_WEB_WAITING_THREADS", 24, minimum=1)
# A request that runs longer is stopped at its next checkpoint (`core.cancellation`). Streamed responses may take longer.
WEB_REQUEST_TIMEOUT_S = env_int("SLUICE_WEB_REQUEST_TIMEOUT_S", 60, minimum=1)

# --- clusters and engine --------------------------------------------------------------------

# The private key of Sluice's SSH certificate authority. Created at the first use, with mode 0600.
SSH_CA_KEY_FILE = Path(os.environ.get("SLUICE_SSH_CA_KEY") or SLUICE_HOME / "ssh" / "ca_key")
# Default of the lowest UID of a new cluster. Sluice never acts as a Unix user with a lower UID.
UID_FLOOR = env_int("SLUICE_UID_FLOOR", 1000, minimum=1)

# After this many days the rows of deleted jobs, and events, are removed from the database.
KEEP_DELETED_JOBS_DAYS = env_int("SLUICE_KEEP_DELETED_JOBS_DAYS", 30)
KEEP_EVENTS_DAYS = env_int("SLUICE_KEEP_EVENTS_DAYS", 365)
# This many days after its last use uploaded code is deleted, unless a live job needs it.
KEEP_UPLOADS_DAYS = env_int("SLUICE_KEEP_UPLOADS_DAYS", 90)

# --- websockets -----------------------------------------------------------------------------

# Open websockets of a person, across the web processes.
SOCKETS_PER_PERSON = env_int("SLUICE_SOCKETS_PER_PERSON", 50, minimum=1)
# Websockets of one web process that are not authenticated yet.
SOCKET_HANDSHAKES = env_int("SLUICE_SOCKET_HANDSHAKES", 256, minimum=1)
# Interval at which an open websocket checks that its person is still signed in and still has the permission.
SOCKET_RECHECK_S = env_int("SLUICE_SOCKET_RECHECK_S", 10, minimum=1)

# --- metrics --------------------------------------------------------------------------------

# Bearer token for `/metrics` and the details of `/readyz`. Administrators need no token. Without one in the environment,
# the demo creates a token in a file.
METRICS_TOKEN = os.environ.get("SLUICE_METRICS_TOKEN", "")
METRICS_TOKEN_FILE = SLUICE_HOME / "metrics_token"
if DEMO and not TESTING and not METRICS_TOKEN:
    METRICS_TOKEN = load_demo_secret(METRICS_TOKEN_FILE.name)

# --- logs: one JSON object per line, each with a field `action` -------------------------------

LOG_FORMAT = env_choice("SLUICE_LOG_FORMAT", "plain" if DEMO else "json", ("json", "plain"))
LOG_LEVEL = env_choice("SLUICE_LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "json": {
            "()": "pythonjsonlogger.json.JsonFormatter",
            "format": "%(asctime)s %(levelname)s %(name)s %(message)s",
            "rename_fields": {"asctime": "time", "levelname": "level", "name": "logger"},
        },
        "plain": {"format": "%(asctime)s %(levelname)-7s %(name)s: %(message)s"},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": LOG_FORMAT}},
    "root": {"handlers": ["stderr"], "level": LOG_LEVEL},
    "loggers": {
        # At INFO, paramiko logs each connection and channel. Its failures raise exceptions, which Sluice logs.
        "paramiko": {"level": "WARNING"},
        "daphne": {"level": "WARNING"},
        "django.channels.server": {"level": "WARNING"},
    },
}
