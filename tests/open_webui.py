"""What Open WebUI reads of its environment, by its own sources of one version."""

VERSION = "0.12.4"
# By the file that reads it: two of its wheel, and the one that its image starts.
READS = {
    "config.py": ("OPENAI_API_BASE_URL", "OPENAI_API_KEY"),
    "start.sh": ("HOST", "PORT"),
    "OpenSSL": ("SSL_CERT_FILE",),
}
