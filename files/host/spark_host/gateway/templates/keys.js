// Digests of named API keys. Run by nginx (njs); spark-host writes BODY_LIMITS above this line.
import crypto from 'crypto';

function digest(r) {
    return crypto.createHash('sha256').update(r.variables.spark_token).digest('hex');
}

// A chunked body has no length before it is stored.
function exceedsBodyLimit(r) {
    const limit = BODY_LIMITS[r.variables.spark_key_name];
    const length = Number(r.headersIn['Content-Length'] || 0);
    return length > limit || r.headersIn['Transfer-Encoding'] ? '1' : '0';
}

export default {digest, exceedsBodyLimit};
