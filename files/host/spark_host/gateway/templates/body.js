// Reads top-level values of a request body. spark-host writes this above names.js and keys.js.
//
// njs frees the memory of a request only after the response, so a body on disk is read through a
// single buffer, and loops allocate nothing per byte: unlike `var`, `let` and `const` would create
// a variable per iteration (33 bytes per byte of the body).
import fs from 'fs';

const CHUNK_BYTES = 65536;
const LONGEST_BYTES = 512;  // of a JSON key or value
const TURN_MS = 5;          // a worker reads this long before it serves other requests

// Streaming JSON reader for top-level strings and numbers; the last wins, as in the engine. null is
// undefined, other values are NaN. The engine validates the JSON.
function scan(fields) {
    return {depth: 0, inString: false, escaped: false, isValue: false, ended: false,
            hasZero: false, fields: fields, key: '', values: {}, kept: Buffer.alloc(LONGEST_BYTES), length: 0};
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
            if (depth === 1) { setValue(state, NaN); }
            depth += 1;
            if (byte === 91 && depth === 1) { state.ended = true; break; }
        } else if (byte === 125 || byte === 93) {
            depth -= 1;
            if (depth === 0) { endNumber(state); }
            if (depth <= 0) { state.ended = true; break; }
        } else if (depth === 1) {
            if (byte === 58) { state.isValue = true; state.length = 0; }
            else if (byte === 44) { endNumber(state); state.isValue = false; }
            else if (byte > 32 && state.length++ < LONGEST_BYTES) {
                state.kept[state.length - 1] = byte;
            }
        }
        if (byte === 0) { state.hasZero = true; }
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
        // Longer keys are not in `fields`, even if every letter is an escape.
        state.key = state.length <= 126 ? text(state) : '';
    } else {
        setValue(state, state.fields.includes(state.key) ? text(state) : undefined);
        state.length = 0;
    }
}

// true, false and numbers that are too long become NaN.
function endNumber(state) {
    if (!state.isValue || !state.length || !state.fields.includes(state.key)) { return; }
    const raw = text(state);
    setValue(state, raw === 'null' ? undefined : state.length > LONGEST_BYTES ? NaN : Number(raw));
    state.length = 0;
}

function setValue(state, value) {
    if (state.isValue && state.fields.includes(state.key)) { state.values[state.key] = value; }
}

function text(state) {
    const raw = state.kept.slice(0, Math.min(state.length, LONGEST_BYTES)).toString();
    if (state.length > LONGEST_BYTES) { return raw; }
    try { return JSON.parse(`"${raw}"`); } catch (error) { return raw; }
}

// Let the worker serve other requests.
function pause() { return new Promise((resolve) => setTimeout(resolve, 0)); }

async function readBody(r, fields) {
    const state = scan(fields);
    const path = r.variables.request_body_file;
    if (!path) {
        const body = r.requestBuffer;
        if (body) { feed(state, body, body.length); }
        return state;
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
        return state;
    } finally {
        fs.closeSync(file);
    }
}
