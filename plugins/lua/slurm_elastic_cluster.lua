-- GPUs of the nodes, read from slurm.conf, as job_submit scripts do not get them from slurmctld.
-- Lua 5.1 to 5.4.

local M = {}

local MAX_NODES = 200000
local MAX_INCLUDES = 100
local MAX_NAME_BYTES = 255

-- Return a pattern for a keyword of Slurm, which is case-insensitive.
local function keyword(word)
	return (word:gsub("%a", function(letter)
		return "[" .. letter:upper() .. letter:lower() .. "]"
	end))
end
local NODE_LINE = "^%s*" .. keyword("nodename") .. "=(%S+)(.*)$"
local GRES = "%s" .. keyword("gres") .. "=(%S+)"
local CLUSTER_NAME = "^%s*" .. keyword("clustername") .. "=([%w_.-]+)%s*$"
local INCLUDE = "^%s*" .. keyword("include") .. "%s+(%S+)"

local function read_file(path)
	local file = io.open(path, "r")
	local text = file and file:read("*a")
	if file then
		file:close()
	end
	return text
end
M.read_file = read_file

-- Return the names of a node list such as r1n[01-03,7],login; several brackets multiply. Raises an
-- error after `limit` expansions, not names: g[1-999999999][] has no name but takes as long.
function M.expand(text, limit)
	local names, left, at, depth = {}, limit or MAX_NODES, 1, 0
	local function expand_one(expression)
		left = left - 1
		assert(left >= 0, "too many nodes")
		local before, inside, after = expression:match("^([^%[]*)%[([^%]]*)%](.*)$")
		if not before then
			assert(#expression <= MAX_NAME_BYTES, "a node's name is too long")
			names[#names + 1] = expression
			return
		end
		for item in inside:gmatch("[^,]+") do
			local first, last = item:match("^(%d+)%-(%d+)$")
			first, last = first or item, last or item
			local form = "%s%0" .. #first .. "d%s"
			for number = tonumber(first), tonumber(last) do
				expand_one(form:format(before, number, after))
			end
		end
	end
	for position = 1, #text + 1 do
		local char = text:sub(position, position)
		depth = depth + (char == "[" and 1 or char == "]" and -1 or 0)
		if char == "" or char == "," and depth == 0 then
			if position > at then
				expand_one(text:sub(at, position - 1))
			end
			at = position + 1
		end
	end
	return names
end

-- Return the GPUs of a Gres= value: their number by type, "" for GPUs without a type.
local function gpus_of(gres)
	local gpus = {}
	for item in gres:gmatch("[^,]+") do
		local name, count = item:match("^gpu:([^:(]+):(%d+)")
		count = count or item:match("^gpu:(%d+)")
		if count then
			gpus[name or ""] = (gpus[name or ""] or 0) + tonumber(count)
		end
	end
	return gpus
end

-- Return the lines of slurm.conf in the directory and of the files that it includes, without comments.
local function configuration(directory)
	local lines, files, at = {}, { "slurm.conf" }, 1
	while files[at] and at <= MAX_INCLUDES do
		local path = files[at]:match("^/") and files[at] or directory .. files[at]
		local text = (read_file(path) or ""):gsub("\\\r?\n", " ")
		for line in text:gmatch("[^\r\n]+") do
			line = line:gsub("#.*", "")
			lines[#lines + 1] = line
			files[#files + 1] = line:match(INCLUDE)
		end
		at = at + 1
	end
	return lines
end

-- Return the GPUs of each node from slurm.conf in the directory and the files that it includes.
function M.read(directory)
	local nodes, default = {}, ""
	for _, line in ipairs(configuration(directory)) do
		local name, rest = line:match(NODE_LINE)
		local gres = name and (" " .. rest):match(GRES) or default
		if name and name:upper() == "DEFAULT" then
			default = gres
		elseif name then
			for _, node in ipairs(M.expand(name)) do
				nodes[node] = gpus_of(gres)
			end
		end
	end
	return nodes
end

-- Return the name of the cluster in slurm.conf, in lower case as Slurm has it; nil if it has none.
function M.cluster_name(directory)
	for _, line in ipairs(configuration(directory)) do
		local name = line:match(CLUSTER_NAME)
		if name then
			return name:lower()
		end
	end
end

-- Return the GPUs per node by type, on the smallest of the listed nodes; "ALL" for all nodes.
function M.sizes(nodes, list, limit)
	local sizes = {}
	if list:upper() ~= "ALL" then
		for _, node in ipairs(M.expand(list, limit)) do
			M.narrow(sizes, nodes[node])
		end
	else
		for _, gpus in pairs(nodes) do
			M.narrow(sizes, gpus)
		end
	end
	return sizes
end

-- Return the listed nodes ("ALL" for all): .members, their GPUs by name; .counts, the number of nodes
-- by type and GPUs; .complete, whether the GPUs of each are known.
function M.inventory(nodes, list)
	local inventory = { members = {}, counts = {}, complete = true }
	local function add(name, gpus)
		if inventory.members[name] then
			return
		end
		inventory.members[name] = gpus
		for gpu_type, number in pairs(gpus) do
			local counts = inventory.counts[gpu_type] or {}
			counts[number] = (counts[number] or 0) + 1
			inventory.counts[gpu_type] = counts
		end
	end
	if list:upper() == "ALL" then
		for name, gpus in pairs(nodes) do
			add(name, gpus)
		end
	else
		for _, name in ipairs(M.expand(list)) do
			inventory.complete = inventory.complete and nodes[name] ~= nil
			add(name, nodes[name] or {})
		end
	end
	return inventory
end

-- Return {GPUs, nodes} pairs of a type in an inventory, without the excluded nodes, the largest nodes
-- first; nil if it does not have the type.
function M.nodes_of(inventory, gpu_type, excluded)
	local counts, left, pairs_of = inventory.counts[gpu_type], {}, {}
	if not counts then
		return nil
	end
	for name in pairs(excluded) do
		local number = (inventory.members[name] or {})[gpu_type]
		if number then
			left[number] = (left[number] or counts[number]) - 1
		end
	end
	for number, count in pairs(counts) do
		pairs_of[#pairs_of + 1] = { number, left[number] or count }
	end
	table.sort(pairs_of, function(a, b)
		return a[1] > b[1]
	end)
	return pairs_of
end

-- Lower each size to that of these GPUs; nil for none.
function M.narrow(sizes, gpus)
	for name, number in pairs(gpus or {}) do
		sizes[name] = math.min(sizes[name] or number, number)
	end
end

return M
