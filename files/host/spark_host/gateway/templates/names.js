// On a host with several services: choose the engine by the model name in the request body.
// Run by nginx (njs); spark-host writes SERVICES and ROUTES above this line.
//
// njs frees memory of a request only after the answer. So a body on disk is read through a single
// buffer, and loops allocate nothing per byte: `let` and `const` would create a variable for every
// turn (33 bytes per byte of the body), `var` does not.
import fs from 'fs';

const CHUNK_BYTES = 65536;
const LONGEST_BYTES = 512;  // of a JSON key or a model name
const TURN_MS = 5;          // a worker reads this long before it serves other requests
const BY_NAME = /^\/by-name(-large)?/;

// Streaming JSON reader for the string value of a top-level `model`; the last wins, as in the
// engine. The engine validates the JSON.
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
            if (depth === 1) { setValue(state, undefined); }
            depth += 1;
            if (byte === 91 && depth === 1) { state.ended = true; break; }
        } else if (byte === 125 || byte === 93) {
            depth -= 1;
            if (depth <= 0) { state.ended = true; break; }
        } else if (depth === 1) {
            if (byte === 58) { state.isValue = true; }
            else if (byte === 44) { state.isValue = false; }
            else if (byte > 32) { setValue(state, undefined); }  // a number, true, false, null
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
        // Longer keys cannot be `model`, even if every letter is an escape.
        state.key = state.length <= 30 ? text(state) : '';
    } else {
        setValue(state, state.key === 'model' ? text(state) : undefined);
    }
}

function setValue(state, value) {
    if (state.isValue && state.key === 'model') { state.model = value; }
}

function text(state) {
    const raw = state.kept.slice(0, Math.min(state.length, LONGEST_BYTES)).toString();
    if (state.length > LONGEST_BYTES) { return raw; }
    try { return JSON.parse(`"${raw}"`); } catch (error) { return raw; }
}

// Let the worker serve other requests.
function pause() { return new Promise((resolve) => setTimeout(resolve, 0)); }

async function modelOf(r) {
    const state = scan();
    const path = r.variables.request_body_file;
    if (!path) {
        const body = r.requestBuffer;
        if (body) { feed(state, body, body.length); }
        return state.model;
    }
    const chunk = Buffer.alloc(CHUNK_BYTES);
    const file = fs.openSync(path);
    var length, since = Date.now();
    try {
        while ((length = fs.readSync(file, chunk, 0, CHUNK_BYTES, null)) > 0 && !state.ended) {
            feed(state, chunk, length);
            if (Date.now() - since >= TURN_MS) {
                await pause();
                since = Date.now();
            }
        }
        return state.model;
    } finally {
        fs.closeSync(file);
    }
}

// Return all services. An open service has the names of the release that answers, which may be an
// older release; a closed service has the names of its settings.
function readServices() {
    return SERVICES.map((entry) => {
        try {
            const lines = fs.readFileSync(entry.traffic, 'utf8').split('\n').filter((line) => line);
            return {service: entry.service, open: true, onRequest: entry.onRequest,
                    names: lines.length > 1 ? lines.slice(1) : entry.names};
        } catch (error) {
            return {service: entry.service, open: false, onRequest: entry.onRequest,
                    names: entry.names};
        }
    });
}

function serviceOf(model) {
    const named = readServices().filter((entry) => entry.names.includes(model));
    return named.find((entry) => entry.open) || named[0];
}

function redirect(r, service, path) {
    const args = r.variables.args;
    r.internalRedirect(`/engine/${service}${path}${args ? `?${args}` : ''}`);
}

function unknownModel(r, model) {
    r.headersOut['Content-Type'] = 'application/json';
    const shown = model.length > 100 ? `${model.slice(0, 100)}...` : model;
    r.return(404, JSON.stringify({type: 'error', error: {
        message: `the model \`${shown}\` does not exist here; /v1/models lists those that do`,
        type: 'not_found_error', param: 'model', code: 'model_not_found'}}));
}

// A request whose body may name a model; without a name the path chooses the engine.
async function choose(r) {
    const path = r.uri.replace(BY_NAME, '');
    let model;
    try {
        model = await modelOf(r);
    } catch (error) {
        r.error(`cannot read the body of a request: ${error}`);
        return r.internalRedirect('/refused/closed');
    }
    if (model === undefined) { return redirect(r, ROUTES[path] || SERVICES[0].service, path); }
    const match = serviceOf(model);
    return match ? redirect(r, match.service, path) : unknownModel(r, model);
}

// GET /v1/models/NAME
function getModel(r) {
    const model = r.uri.slice('/v1/models/'.length);
    const match = serviceOf(model);
    return match ? redirect(r, match.service, r.uri) : unknownModel(r, model);
}

function modelsIn(answer) {
    try {
        const data = answer.status === 200 ? JSON.parse(answer.responseText).data : [];
        return Array.isArray(data) ? data : [];
    } catch (error) {
        return [];
    }
}

// GET /v1/models: the models of every service that is open or starts on request, with a state.
async function listModels(r) {
    const listed = readServices().filter((entry) => entry.open || entry.onRequest);
    const answers = listed.map((entry) => r.subrequest(`/engine/${entry.service}/v1/models`));
    const data = [];
    (await Promise.all(answers)).forEach((answer) => modelsIn(answer).forEach((model) => {
        data.push(Object.assign({state: 'ready'}, model));
    }));
    if (data.length === 0) { return r.internalRedirect('/refused/closed'); }
    r.headersOut['Content-Type'] = 'application/json';
    r.return(200, JSON.stringify({object: 'list', data: data}));
}

export default {choose, getModel, listModels};
