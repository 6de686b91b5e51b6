// On a host with several services: choose the engine by the model name in the request body.
// Run by nginx (njs); spark-host writes SERVICES, ROUTES and body.js above this line.
const BY_NAME = /^\/by-name(-large)?/;

// Return all services. An open service has the names of its running release, which may be an
// older release; a closed service has the names in its settings.
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
    const label = model.length > 100 ? `${model.slice(0, 100)}...` : model;
    r.return(404, JSON.stringify({type: 'error', error: {
        message: `no such model \`${label}\`; GET /v1/models lists the available models`,
        type: 'not_found_error', param: 'model', code: 'model_not_found'}}));
}

// A request whose body may name a model; without a name the path chooses the engine.
async function choose(r) {
    const path = r.uri.replace(BY_NAME, '');
    let model;
    try {
        model = (await readBody(r, ['model'])).values.model;
    } catch (error) {
        r.error(`cannot read the body of a request: ${error}`);
        return r.internalRedirect('/refused/closed');
    }
    if (typeof model !== 'string') { return redirect(r, ROUTES[path] || SERVICES[0].service, path); }
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

// GET /v1/models: the models of every service that is open or starts on demand, with a state.
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
