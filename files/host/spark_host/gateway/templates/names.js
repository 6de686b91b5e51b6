// Of a host with several services: the engine that a request is for, by the model its body names.
// Run by nginx (njs); spark-host writes SERVICES and ROUTES above this.
//
// What njs makes for a request is kept until its answer has ended. So a body that lies on the disk
// is read through one buffer, and nothing is made for each byte of it: in loops, `let` and `const`
// would make a new variable for every turn (33 bytes for each of the body), `var` does not.
import fs from 'fs';

const PIECE_BYTES = 65536;
const LONGEST_BYTES = 512;  // of a key or a name
const TURN_MS = 5;          // so long a worker reads before others are served
const BY_NAME = /^\/by-name(-large)?/;

// Reads JSON as it comes, for the string that `model` has at the top of an object. Of two it is the
// last, as for the engine. Whether it is JSON at all is the engine's to judge.
function scan() {
    return {depth: 0, inString: false, escaped: false, isValue: false, ended: false,
            key: '', model: undefined, kept: Buffer.alloc(LONGEST_BYTES), length: 0};
}

function feed(state, bytes, end) {
    var at = 0, backslash = -1, stop;
    while (at < end && !state.ended) {
        if (!state.inString) {
            at = betweenStrings(state, bytes, at, end);
            continue;
        }
        if (state.escaped) {
            state.escaped = false;
            at = keep(state, bytes, at, at + 1);
            continue;
        }
        stop = bytes.indexOf(34, at);
        if (stop < 0 || stop > end) { stop = end; }
        if (backslash < at) {
            backslash = bytes.indexOf(92, at);
            if (backslash < 0) { backslash = end; }
        }
        if (backslash < stop) {
            at = keep(state, bytes, at, backslash + 1);
            state.escaped = true;
        } else {
            at = keep(state, bytes, at, stop) + 1;
            if (stop < end) { endString(state); }
        }
    }
}

function betweenStrings(state, bytes, start, end) {
    var depth = state.depth, byte;
    for (var at = start; at < end; at++) {
        byte = bytes[at];
        if (byte === 34) {
            state.inString = true;
            state.length = 0;
            state.ended = depth === 0;
            state.depth = depth;
            return at + 1;
        }
        if (byte === 123 || byte === 91) {
            if (depth === 1) { seen(state, undefined); }
            depth += 1;
            if (byte === 91 && depth === 1) { state.ended = true; break; }
        } else if (byte === 125 || byte === 93) {
            depth -= 1;
            if (depth <= 0) { state.ended = true; break; }
        } else if (depth === 1) {
            if (byte === 58) { state.isValue = true; }
            else if (byte === 44) { state.isValue = false; }
            else if (byte > 32) { seen(state, undefined); }  // a number, true, false, null
        }
    }
    state.depth = depth;
    return end;
}

function keep(state, bytes, start, end) {
    if (state.depth === 1) {
        for (var at = start; at < end && state.length <= LONGEST_BYTES; at++) {
            if (state.length < LONGEST_BYTES) { state.kept[state.length] = bytes[at]; }
            state.length += 1;
        }
    }
    return end;
}

function endString(state) {
    state.inString = false;
    if (state.depth !== 1) { return; }
    if (!state.isValue) {
        // No key of this length is ours, unless each of its letters was written as an escape.
        state.key = state.length <= 30 ? text(state) : '';
    } else {
        seen(state, state.key === 'model' ? text(state) : undefined);
    }
}

function seen(state, value) {
    if (state.isValue && state.key === 'model') { state.model = value; }
}

function text(state) {
    const raw = state.kept.slice(0, Math.min(state.length, LONGEST_BYTES)).toString();
    if (state.length > LONGEST_BYTES) { return raw; }
    try { return JSON.parse(`"${raw}"`); } catch (error) { return raw; }
}

// Others are served between two pieces.
function rest() { return new Promise((resolve) => setTimeout(resolve, 0)); }

async function modelOf(r) {
    const state = scan();
    const path = r.variables.request_body_file;
    if (!path) {
        const body = r.requestBuffer;
        if (body) { feed(state, body, body.length); }
        return state.model;
    }
    const piece = Buffer.alloc(PIECE_BYTES);
    const file = fs.openSync(path);
    var length, since = Date.now();
    try {
        while ((length = fs.readSync(file, piece, 0, PIECE_BYTES, null)) > 0 && !state.ended) {
            feed(state, piece, length);
            if (Date.now() - since >= TURN_MS) {
                await rest();
                since = Date.now();
            }
        }
        return state.model;
    } finally {
        fs.closeSync(file);
    }
}

// While its traffic is open a service has the names of the release that answers, which may be an
// older one; else those that it is to have.
function standing() {
    return SERVICES.map((one) => {
        try {
            const lines = fs.readFileSync(one.traffic, 'utf8').split('\n').filter((line) => line);
            return {service: one.service, open: true,
                    names: lines.length > 1 ? lines.slice(1) : one.names};
        } catch (error) {
            return {service: one.service, open: false, names: one.names};
        }
    });
}

function serviceOf(model) {
    const named = standing().filter((one) => one.names.includes(model));
    return named.find((one) => one.open) || named[0];
}

function hand(r, service, path) {
    const args = r.variables.args;
    r.internalRedirect(`/engine/${service}${path}${args ? `?${args}` : ''}`);
}

function unknown(r, model) {
    r.headersOut['Content-Type'] = 'application/json';
    const shown = model.length > 100 ? `${model.slice(0, 100)}...` : model;
    r.return(404, JSON.stringify({type: 'error', error: {
        message: `the model \`${shown}\` does not exist here; /v1/models lists those that do`,
        type: 'not_found_error', param: 'model', code: 'model_not_found'}}));
}

// A request whose body may name a model; without a name it goes where its path goes.
async function choose(r) {
    const path = r.uri.replace(BY_NAME, '');
    let model;
    try {
        model = await modelOf(r);
    } catch (error) {
        r.error(`cannot read the body of a request: ${error}`);
        return r.internalRedirect('/refused/closed');
    }
    if (model === undefined) { return hand(r, ROUTES[path] || SERVICES[0].service, path); }
    const found = serviceOf(model);
    return found ? hand(r, found.service, path) : unknown(r, model);
}

// GET /v1/models/NAME
function one(r) {
    const model = r.uri.slice('/v1/models/'.length);
    const found = serviceOf(model);
    return found ? hand(r, found.service, r.uri) : unknown(r, model);
}

function modelsIn(answer) {
    try {
        const data = answer.status === 200 ? JSON.parse(answer.responseText).data : [];
        return Array.isArray(data) ? data : [];
    } catch (error) {
        return [];
    }
}

// GET /v1/models: of every service that answers now.
async function all(r) {
    const open = standing().filter((one) => one.open);
    const asked = open.map((one) => r.subrequest(`/engine/${one.service}/v1/models`));
    const data = [];
    (await Promise.all(asked)).forEach((answer) => modelsIn(answer).forEach((one) => data.push(one)));
    if (data.length === 0) { return r.internalRedirect('/refused/closed'); }
    r.headersOut['Content-Type'] = 'application/json';
    r.return(200, JSON.stringify({object: 'list', data: data}));
}

export default {choose, one, all};
