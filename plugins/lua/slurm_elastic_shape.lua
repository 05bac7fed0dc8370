-- The shape of a job, as submitted and as it starts. Reads the fields of job_desc, changes none.
-- Lua 5.1 to 5.4.

local cluster = require("slurm_elastic_cluster")
local directive = require("slurm_elastic_directive")

local M = {}

local NICE_OFFSET = 2147483648
local UNSET_16 = 65534
local UNSET_32 = 4294967294
local MAX_GPUS = 65536
-- More sizes or types are not named in a message.
local MAX_NAMED = 8

-- Fields that describe a job's shape, and their value if not given; false where that is nil.
-- Without min_cpus: sbatch always sends an estimate.
local NUMBERS = {
	begin_time = 0, contiguous = 0, core_spec = UNSET_16, cores_per_socket = UNSET_16,
	cpus_per_task = UNSET_16, max_nodes = UNSET_32, min_mem_per_cpu = false,
	min_mem_per_node = false, min_nodes = UNSET_32, nice = UNSET_32,
	ntasks_per_node = UNSET_16, ntasks_per_socket = UNSET_16, ntasks_per_tres = UNSET_16,
	num_tasks = UNSET_32, pn_min_cpus = UNSET_16, pn_min_tmp_disk = UNSET_32,
	req_switch = UNSET_32, shared = UNSET_16, sockets_per_node = UNSET_16,
	threads_per_core = UNSET_16, time_limit = UNSET_32, time_min = UNSET_32,
	wait4switch = UNSET_32,
}
local STRINGS = {
	"cpus_per_tres", "dependency", "exc_nodes", "features", "licenses", "mem_per_tres", "network",
	"partition", "prefer", "qos", "req_nodes", "reservation", "tres_bind", "tres_freq",
	"tres_per_job", "tres_per_node", "tres_per_socket", "tres_per_task",
}
local GPU_FIELDS = { "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket" }

-- Refusals are raised as tables; slurm_elastic.lua catches them.
local function refuse(format, ...)
	error({ refusal = string.format(format, ...) }, 0)
end
M.refuse = refuse

function M.count_of(gpus)
	return gpus == 1 and "1 GPU" or string.format("%d GPUs", gpus)
end

-- Return the sizes of a directive for people: 1-8 GPUs; 1, 2 or 4 GPUs.
function M.span_of(d)
	if #d.listed < 2 or #d.listed > MAX_NAMED then
		return d.min == d.max and M.count_of(d.min) or string.format("%d-%d GPUs", d.min, d.max)
	end
	local words = {}
	for i, size in ipairs(d.listed) do
		words[i] = string.format("%d", size)
	end
	local last = table.remove(words)
	return string.format("%s or %s GPUs", table.concat(words, ", "), last)
end

-- Return a number that the user gave, or nil.
local function given(job, name)
	local value = job[name]
	if value and value ~= NUMBERS[name] and value < 2 ^ 53 then
		return value
	end
end

-- Return the fields that the user gave, as Slurm stores them; nice without its offset.
function M.submitted(job)
	local shape = {}
	for name in pairs(NUMBERS) do
		shape[name] = given(job, name)
	end
	for _, name in ipairs(STRINGS) do
		if job[name] and job[name] ~= "" then
			shape[name] = job[name]
		end
	end
	shape.nice = shape.nice and shape.nice ~= NICE_OFFSET and shape.nice - NICE_OFFSET or nil
	return shape
end

-- Return the bytes of all strings that describe the job's shape.
function M.bytes(job)
	local count = 0
	for _, name in ipairs(STRINGS) do
		count = count + #(job[name] or "")
	end
	return count
end

-- Return number and type (nil without one) of the GPUs in a request; nothing without GPUs.
local function read_request(text)
	local total, gpu_type
	for item in (text or ""):gmatch("[^,]+") do
		local kind, rest = item:match("^gres[/:]([^:=]+)[:=]?(.*)$")
		if kind ~= "gpu" and (kind or item:match("^license")) then
			refuse("%s cannot be resized: ask for whole GPUs only", item)
		elseif kind then
			local name, count, suffix = rest:match("^([^:=]+)[:=](%d+)([kK]?)$")
			if not count then
				count, suffix = rest:match("^(%d+)([kK]?)$")
			end
			if not count then
				name, count, suffix = rest ~= "" and rest or nil, 1, ""
			end
			if name and name:match("[:=]") then
				refuse("%s is invalid: expected gpu:TYPE:COUNT", item)
			elseif name and directive.is_slice(name) then
				refuse("%s is a slice of a GPU (MIG): ask for whole GPUs only", item)
			elseif tonumber(count) > MAX_GPUS then
				refuse("%s asks for more GPUs than the %d that a directive can name", item, MAX_GPUS)
			elseif total and name ~= gpu_type then
				refuse("%s names two types of GPUs: an elastic job runs on one at a time", text)
			end
			total, gpu_type = (total or 0) + tonumber(count) * (suffix == "" and 1 or 1024), name
		end
	end
	return total, gpu_type
end

-- Return the job's own shape: GPUs, type, nodes, and the GPUs that belong together on a node; nothing
-- if it names no GPUs.
local function own_shape(job)
	local requests, gpu_type = {}, nil
	for _, field in ipairs(GPU_FIELDS) do
		local count, name = read_request(job[field])
		if gpu_type and name and name ~= gpu_type then
			refuse("%s and %s are two types of GPUs: an elastic job runs on one at a time",
				gpu_type, name)
		end
		requests[field], gpu_type = count, name or gpu_type
	end
	local nodes, tasks = given(job, "min_nodes"), given(job, "num_tasks")
	local per_node, per_gpu = given(job, "ntasks_per_node"), given(job, "ntasks_per_tres")
	if not nodes and tasks and per_node and per_node > 0 then
		nodes = math.ceil(tasks / per_node)
	end
	tasks = tasks or (per_node or 1) * (nodes or 1)
	if requests.tres_per_job then
		return requests.tres_per_job, gpu_type, nodes, 1
	elseif requests.tres_per_node then
		return requests.tres_per_node * (nodes or 1), gpu_type, nodes or 1, requests.tres_per_node
	elseif requests.tres_per_task then
		local each = requests.tres_per_task
		return each * tasks, gpu_type, nodes, each * math.min(per_node or 1, tasks)
	elseif requests.tres_per_socket then
		local each = requests.tres_per_socket * (given(job, "sockets_per_node") or 1)
		return each * (nodes or 1), gpu_type, nodes or 1, each
	elseif per_gpu and per_gpu > 0 and given(job, "num_tasks") then
		return math.ceil(tasks / per_gpu), nil, nodes, 1
	end
end

-- Return the types on which the job may use this number of GPUs, the preferred one first; types
-- that the cluster does not have only if it has none of them. Without a preference the types with
-- the largest nodes come first.
local function legal_types(d, gpus, settings)
	local names, legal = d.types, {}
	if #names == 0 then
		names = {}
		for name in pairs(settings.gpus_per_node) do
			names[#names + 1] = name ~= "" and name or nil
		end
		table.sort(names, function(a, b)
			local size_a, size_b = settings.gpus_per_node[a], settings.gpus_per_node[b]
			return size_a > size_b or size_a == size_b and a < b
		end)
	end
	local unknown = {}
	for _, name in ipairs(names) do
		if directive.allows(d, gpus, name) then
			local list = settings.gpus_per_node[name] and legal or unknown
			list[#list + 1] = name
		end
	end
	return #legal > 0 and legal or unknown
end

-- Return the least GPUs per node of this type or, without one, of these types.
local function node_size(gpu_type, types, settings)
	local sizes = settings.gpus_per_node
	local default = sizes[""] or settings.default_gpus_per_node or 4
	if gpu_type then
		return sizes[gpu_type] or default
	end
	local smallest = math.huge
	for _, name in ipairs(types) do
		smallest = math.min(smallest, sizes[name] or default)
	end
	return smallest < math.huge and smallest or default
end

-- Return whether a request without a type can only be met by GPUs of one type that the job may
-- use. With features and no types in the directive, the features decide.
local function needs_no_type(d, job, gpus, nodes, settings)
	if #d.types == 0 and (job.features or "") ~= "" then
		return true
	end
	local kinds = 0
	for name in pairs(settings.partition) do
		kinds = kinds + 1
		if not directive.allows(d, gpus, name) and not (name == "" and #d.types == 0) then
			return false
		end
	end
	if kinds == 0 then
		return #d.types == 0
	end
	return #d.types ~= 1 and (kinds == 1 or nodes == 1)
end

-- Return whether {GPUs, nodes} pairs, the largest nodes first, suffice for a request.
local function suffice(available, want)
	local nodes, gpus = 0, 0
	for _, pair in ipairs(available) do
		local size, count = pair[1], pair[2]
		if size >= want.each and size > 0 then
			local used = math.max(0, math.min(count, want.most - nodes))
			nodes, gpus = nodes + count, gpus + used * (size - size % want.each)
		end
	end
	return nodes >= want.nodes and gpus >= want.gpus
end

-- Return a function from a type to its nodes in each inventory that has it, without the excluded ones.
function M.stock_of(inventories, excluded)
	local known = {}
	return function(gpu_type)
		if not known[gpu_type] then
			local lists = {}
			for _, inventory in ipairs(inventories) do
				lists[#lists + 1] = cluster.nodes_of(inventory, gpu_type, excluded)
			end
			known[gpu_type] = lists
		end
		return known[gpu_type]
	end
end

-- Return whether one of the job's partitions has enough nodes of a type for the request: .gpus on
-- .nodes to .most nodes, .each of them together on a node. True for types that none has.
local function fits(gpu_type, want, settings)
	local lists = settings.stock(gpu_type)
	for _, available in ipairs(lists) do
		if suffice(available, want) then
			return true
		end
	end
	return #lists == 0
end

-- Return the first type that has enough nodes for the request. Without one, the first of all types if
-- some nodes are not known, else nil.
local function first_fitting(types, want, settings)
	for _, name in ipairs(types) do
		if fits(name, want, settings) then
			return name
		end
	end
	return not settings.complete and types[1] or nil
end

-- Return the type, and the largest smaller number of nodes, that have the GPUs of the request in equal
-- shares; nothing if there is none, or if the request has more nodes than GPUs.
local function fewer_nodes(types, want, settings)
	for nodes = want.nodes - 1, want.nodes > want.gpus and want.nodes or 1, -1 do
		local each = want.gpus / nodes
		if each % want.each == 0 then
			local fewer = { gpus = want.gpus, nodes = nodes, most = nodes, each = each }
			for _, name in ipairs(types) do
				if fits(name, fewer, settings) then
					return name, nodes
				end
			end
		end
	end
end

local function refuse_place(types, want, settings)
	local words = {}
	for i = 1, math.min(#types, MAX_NAMED) do
		local parts = {}
		for _, available in ipairs(settings.stock(types[i])) do
			for _, pair in ipairs(available) do
				parts[#parts + 1] = pair[2] > 0 and string.format("%d node%s of %s", pair[2],
					pair[2] == 1 and "" or "s", M.count_of(pair[1])) or nil
			end
		end
		words[i] = types[i] .. ": " .. (#parts > 0 and table.concat(parts, ", ") or "no node")
	end
	local on = want.most == 1 and " on one node"
		or want.nodes > 1 and string.format(" on %d nodes", want.nodes) or ""
	refuse("no GPU type that the job may use has %s%s in its partition (%s):"
		.. " ask for fewer GPUs or nodes", M.count_of(want.gpus), on, table.concat(words, "; "))
end

local function request(gpus, gpu_type)
	return gpu_type and string.format("gres/gpu:%s:%d", gpu_type, gpus)
		or string.format("gres/gpu:%d", gpus)
end
local function fewer_note(nodes, given_nodes)
	return string.format(" on %d node%s, as no GPU type of the partition has %d", nodes,
		nodes == 1 and "" or "s", given_nodes)
end

-- Return the number of nodes on which this many GPUs of a type fit in equal shares: the one proposed,
-- else the fewest from `least` to `most`; the one proposed if there is none.
local function even_nodes(gpus, gpu_type, proposed, least, most, settings)
	local function holds(nodes)
		local each = gpus % nodes == 0 and gpus / nodes or 1
		local want = { gpus = gpus, nodes = nodes, most = nodes, each = each }
		return fits(gpu_type, want, settings)
	end
	for nodes = least, holds(proposed) and 0 or math.min(most, gpus) do
		if gpus % nodes == 0 and holds(nodes) then
			return nodes
		end
	end
	return proposed
end

-- Return the changes by which a job that names no GPUs starts at its smallest size.
local function default_shape(d, job, settings)
	local gpus, gpu_type = directive.start(d)
	local types = legal_types(d, gpus, settings)
	local least, most = given(job, "min_nodes") or 1, given(job, "max_nodes") or math.huge
	local function nodes_for(name)
		local needed = math.ceil(gpus / node_size(name, types, settings))
		return math.max(least, math.min(most, needed))
	end
	local by_features = #d.types == 0 and (job.features or "") ~= ""
	local nodes = nodes_for(gpu_type)
	if nodes > gpus then
		refuse("%d nodes need as many GPUs at least, but the job starts at %d:"
			.. " leave --nodes out or raise MIN", nodes, gpus)
	end
	local note = ""
	if not by_features and #types > 0 then
		local names = gpu_type and { gpu_type } or types
		local want = { gpus = gpus, nodes = least, most = most, each = 1 }
		local chosen = first_fitting(names, want, settings)
		if not chosen then
			chosen, least = fewer_nodes(names, want, settings)
			if not chosen then
				refuse_place(names, want, settings)
			end
			gpu_type, most, note = chosen, least, fewer_note(least, want.nodes)
		elseif not gpu_type and not needs_no_type(d, job, gpus, nodes, settings) then
			gpu_type = chosen
		end
		nodes = even_nodes(gpus, gpu_type or chosen, nodes_for(gpu_type), least, most, settings)
	end
	local changes = { min_nodes = nodes, max_nodes = nodes }
	if gpus % nodes == 0 then
		changes.tres_per_node = request(gpus / nodes, gpu_type)
	else
		changes.tres_per_job = request(gpus, gpu_type)
	end
	local tasks = given(job, "num_tasks")
	if tasks and tasks < nodes or not tasks and changes.tres_per_job then
		changes.num_tasks = nodes -- Slurm wants one on each node
	end
	return changes, gpus, gpu_type, note
end

-- Return the job's own requests, narrowed to one type.
local function typed_requests(job, gpus, gpu_type)
	local changes = {}
	for _, field in ipairs(GPU_FIELDS) do
		local text = job[field] or ""
		if text:match("gres[/:]gpu") then
			changes[field] = text:gsub("(gres[/:]gpu)[:=]?(%d*)", function(gpu, count)
				return gpu .. ":" .. gpu_type .. (count ~= "" and ":" .. count or "")
			end)
		end
	end
	if not next(changes) then -- --ntasks-per-gpu alone
		changes.tres_per_job = request(gpus, gpu_type)
	end
	return changes
end

-- Refuse a number of GPUs that the directive does not allow.
local function check_size(d, gpus, gpu_type, types)
	if #d.listed > 0 and not directive.lists(d, gpus) then
		local below, above
		for _, size in ipairs(d.listed) do
			below, above = size < gpus and size or below, above or size > gpus and size or nil
		end
		local near = below and above and string.format("%d or %s", below, M.count_of(above))
			or M.count_of(below or above)
		refuse("the job asks for %s to start with, not among its sizes: ask for %s, or add %d"
			.. " to sizes", M.count_of(gpus), near, gpus)
	elseif gpus < d.min or gpus > d.max then
		refuse("the job asks for %s to start with, outside %d-%d: change one of them",
			M.count_of(gpus), d.min, d.max)
	elseif gpu_type and not directive.allows(d, gpus, gpu_type) then
		refuse("the job asks for %d %s to start with, which --elastic=%s does not allow", gpus,
			gpu_type, directive.format(d))
	elseif #d.types > 0 and #types == 0 or d.unit and gpus % d.unit ~= 0 then
		refuse("the job asks for %s to start with, no multiple of its unit: change one of them",
			M.count_of(gpus))
	end
end

-- Check the job's own shape against its directive; return changes that exclude GPUs of several
-- types or of a type that the directive does not allow.
local function checked_shape(d, job, settings, gpus, gpu_type, nodes, each)
	local types = legal_types(d, gpus, settings)
	check_size(d, gpus, gpu_type, types)
	local want = { gpus = gpus, nodes = nodes or 1, each = each,
		most = given(job, "max_nodes") or math.huge }
	local chosen, note, most = types[1], "", nil
	if #d.types > 0 or (job.features or "") == "" then
		local candidates = gpu_type and { gpu_type } or types
		chosen = first_fitting(candidates, want, settings)
		if not chosen and #candidates > 0 then
			if (job.tres_per_node or "") == "" and (job.tres_per_socket or "") == ""
					and not given(job, "ntasks_per_node") then
				chosen, most = fewer_nodes(candidates, want, settings)
			end
			if not chosen then
				refuse_place(candidates, want, settings)
			end
			nodes, note = most, fewer_note(most, want.nodes)
		end
	end
	local changes = {}
	local per_node = (job.tres_per_node or "") ~= ""
	if not per_node and not most then
		nodes = math.max(nodes or 1, math.ceil(gpus / node_size(gpu_type, types, settings)))
	end
	if not gpu_type and chosen and (most or not needs_no_type(d, job, gpus, nodes, settings)) then
		gpu_type = chosen
		changes = typed_requests(job, gpus, gpu_type)
	end
	if per_node or most or not gpu_type then
		changes.min_nodes, changes.max_nodes = nodes, nodes
	end
	return changes, gpus, gpu_type, note
end

-- Refuse a form in which a job cannot be resized.
function M.check_form(job)
	local per_gpu = given(job, "ntasks_per_tres")
	if per_gpu and per_gpu > 1 then
		refuse("--ntasks-per-gpu=%d cannot be resized: leave it out, esrun starts one rank on each GPU",
			per_gpu)
	end
end

-- Refuse a job whose partitions have slices of GPUs and no whole one.
local function check_slices(settings)
	local slice
	for name in pairs(settings.partition) do
		if not directive.is_slice(name) then
			return
		end
		slice = slice and slice < name and slice or name
	end
	if slice then
		refuse("its partition has slices of GPUs (MIG: %s) and no whole ones, and slices cannot be"
			.. " resized: name another partition or leave out --elastic", slice)
	end
end

-- Return the fields to change so that the job starts within its directive, the number of GPUs that
-- it starts with, their type, nil for any, and what its user is told of fewer nodes. The settings
-- have the GPUs per node by type ("" for GPUs without one): .partition in the job's partitions,
-- .gpus_per_node on the nodes that it names or else there; and .default_gpus_per_node where these
-- have none. .stock is from `stock_of`; .complete: it has all nodes of these partitions.
function M.start(d, job, settings)
	check_slices(settings)
	local gpus, gpu_type, nodes, each = own_shape(job)
	if gpus then
		return checked_shape(d, job, settings, gpus, gpu_type, nodes, each)
	end
	return default_shape(d, job, settings)
end

return M
