"""The environment variables that Open WebUI reads, from the sources of a version."""

VERSION = "0.12.4"
READS = {
    "config.py": ("OPENAI_API_BASE_URL", "OPENAI_API_KEY"),
    "start.sh": ("HOST", "PORT"),
    "OpenSSL": ("SSL_CERT_FILE",),
}
