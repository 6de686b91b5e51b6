// Digests and limits of named API keys. Run by nginx (njs); spark-host writes constants and body.js
// above this line.
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

function isPositive(value) { return Number.isInteger(value) && value > 0; }

// The engine also reads UTF-16 and UTF-32, in which this scan can find different values.
function fits(state, fields, limit) {
    const values = state.values, choices = values.n === undefined ? 1 : values.n;
    const sent = fields.map((field) => values[field]).filter((value) => value !== undefined);
    return !state.hasZero && sent.length > 0 && isPositive(choices)
        && sent.every((value) => isPositive(value) && value * choices <= limit)
        && (values.prompt === undefined || typeof values.prompt === 'string');
}

// Reject a request whose response could be longer than the key allows.
async function limitOutput(r) {
    const path = r.uri.replace(/^\/limit-output(-large)?/, ''), fields = OUTPUT_FIELDS[path];
    const name = r.variables.spark_key_name, limit = OUTPUT_LIMITS[name], args = r.variables.args;
    let state;
    try {
        state = await readBody(r, fields.concat('n', 'prompt'));
    } catch (error) {
        r.error(`cannot read the body of a request: ${error}`);
        return r.internalRedirect('/refused/closed');
    }
    if (fits(state, fields, limit)) {
        return r.internalRedirect(`/limited${path}${args ? `?${args}` : ''}`);
    }
    const fix = `set ${fields[0]} to at most ${limit} divided by n, and send one prompt as text`;
    r.headersOut['Content-Type'] = 'application/json';
    r.return(400, JSON.stringify({type: 'error', error: {
        message: `${path}: key ${name} may request at most ${limit} output tokens; ${fix}`,
        type: 'invalid_request_error', param: fields[0], code: 400}}));
}

export default {digest, exceedsBodyLimit, limitOutput};
